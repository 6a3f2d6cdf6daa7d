"""A lower learning rate, for as many steps."""

from retention.method import During

METHOD = During(
    "lower learning rate",
    "nothing",
    candidates=(0.75, 0.5, 0.25, 0.1),
    chosen={"vision": 0.75, "sequence": 0.25},
    rate=lambda pair, value: value * pair.rate,
)
