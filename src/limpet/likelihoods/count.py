"""The number of examples N of a task, with its unit."""

from __future__ import annotations


class Count(int):
    """The number of examples N of a task, in the unit that its mean loss averages over.

    For one prediction per row of a batch, N is the number of rows. For one prediction per position (language models,
    token classification, segmentation) it is the number of predicted positions. A `Count` is an integer, so it can be
    passed as `examples=`. It is made by `memory.count(batches)` and by a pass over the data.

    Attributes:
        rows: Number of rows of all batches.

    Examples:
        >>> Count(4000, rows=400)
        Count(4000, rows=400)
        >>> print(Count(4000, rows=400))
        4,000 predicted positions in 400 rows
    """

    rows: int

    def __new__(cls, terms: int, rows: int) -> Count:
        """Create a count.

        Args:
            terms: Number of terms that the mean loss averages over.
            rows: Number of rows of all batches.

        Returns:
            The count.
        """
        count = super().__new__(cls, terms)
        count.rows = rows
        return count

    @property
    def unit(self) -> str:
        """The unit, "rows" or "predicted positions"."""
        return "rows" if self == self.rows else "predicted positions"

    def scaled(self, rows: int) -> Count:
        """Return the count of a data set with another number of rows, and as many predictions per row.

        Args:
            rows: The number of rows.

        Returns:
            The scaled count.
        """
        return Count(round(self * (rows / self.rows)), rows)

    def __repr__(self) -> str:
        return f"Count({int(self)}, rows={self.rows})"

    def __str__(self) -> str:
        return f"{int(self):,} rows" if self.unit == "rows" else f"{int(self):,} {self.unit} in {self.rows:,} rows"

    def __reduce__(self) -> tuple[type[Count], tuple[int, int]]:
        return Count, (int(self), self.rows)
