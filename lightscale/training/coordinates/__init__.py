"""The coordinate check: sizes of activations over widths."""
