"""The built-in tasks, one file each; `lightscale.evaluation.registry` names them."""
