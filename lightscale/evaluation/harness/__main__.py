"""``python -m lightscale.evaluation.harness``: lm-eval's own command line, with the model `lightscale`."""

import sys

from lightscale.errors import UserError
from lightscale.evaluation.harness_names import require_lm_eval


def main() -> int:
    """As `lm_eval`; exit code 2 for a mistake in the request."""
    try:
        require_lm_eval()
        # Behind the check: without lm-eval there is nothing to import.
        from lm_eval.__main__ import cli_evaluate  # noqa: PLC0415

        from lightscale.evaluation.harness import model  # noqa: PLC0415

        assert model.NAME
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
