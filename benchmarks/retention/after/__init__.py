"""Methods that act on a trained model, one file each."""

from retention.after import intruders, lines, protect, repair, scaling, ties
from retention.method import After

METHODS: dict[str, After] = {
    module.METHOD.name: module.METHOD for module in (scaling, lines, ties, intruders, repair, protect)
}
