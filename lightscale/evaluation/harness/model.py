"""Our models inside lm-eval: ``lm_eval.simple_evaluate("lightscale", model_args="run=runs/mine", tasks=["piqa"])``.

lm-eval finds a model by the name under which it was registered, and looks into no installed packages: importing this
module registers ``lightscale``. ``python -m lightscale.evaluation.harness`` is lm-eval's command line behind it.

On several ranks (torchrun) every rank asks all requests, and gets all answers: to lm-eval they are one process.
"""

import atexit
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from lightscale.config.arguments import run_path
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import choose_run, longest_context
from lightscale.evaluation.evaluate import check_lengths
from lightscale.evaluation.harness.translation import answered, request_of
from lightscale.evaluation.inference.requests import Encoder, LogLikelihood, num_tokens
from lightscale.evaluation.inference.scoring import Scorer, ScoringSettings
from lightscale.evaluation.model import mesh_of, restore
from lightscale.evaluation.progress import EvaluationProgress
from lightscale.runs.run_directory import split_step

NAME = "lightscale"
# lm-eval gives it to every model unless --device names another, whatever devices there are.
_DEFAULT_DEVICE = "cuda:0"
_MAY_CHANGE = ("parallel.", "train.precision", "train.kernels")


@register_model(NAME)
class LightscaleLM(TemplateLM):
    """A run's model that answers lm-eval's requests.

    Args:
        run: directory of a run, or NAME for runs/NAME; RUN@STEP for a step (default: the newest checkpoint).
        device: "auto", "cpu" or "cuda"; "cuda:0" is "auto".
        store: token store with the tokenizer; None: the run's own.
        row_tokens: tokens that pass through the model at once; takes the place of a batch size.
        context: longest prompt in tokens; None: any for linear mixers, the longest sequence of training for softmax.
        batch_size, max_batch_size: without effect. Requests are packed, and lm-eval gives these to every model.
        overrides: `parallel.tensor=2` and so on, as for `lightscale evaluate`.

    Raises:
        UserError: no such run, an argument that is not known, and later a prompt that is longer than the context.
    """

    def __init__(
        self,
        run: str,
        *,
        device: str = "auto",
        store: str | None = None,
        row_tokens: int = 8192,
        context: int | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **overrides: Any,
    ) -> None:
        super().__init__()
        for name in overrides:
            if not name.startswith(_MAY_CHANGE):
                known = "run, device, store, row_tokens, context"
                raise UserError(f"--model_args: no argument {name!r}; known: {known}, {', '.join(_MAY_CHANGE)}…")
        if device == _DEFAULT_DEVICE:
            device = "auto"
        words = [f"train.device={device}", *(f"{name}={value}" for name, value in overrides.items())]
        directory, step = split_step(str(run))
        self._run = choose_run(
            run_path(directory), step=step, store=None if store is None else Path(store), overrides=words
        )
        self._context = context
        stack = contextlib.ExitStack()
        # Process groups must end before the interpreter does, and lm-eval does not say when it has finished.
        atexit.register(stack.close)
        self._mesh = mesh = stack.enter_context(mesh_of(self._run.config))
        loaded = restore(self._run, mesh)
        self._loaded, self._encoder = loaded, Encoder(loaded.tokenizer)
        self._progress = EvaluationProgress(f"{self._run.directory.path}@{loaded.step}", enabled=mesh.rank == 0)
        self._scorer = Scorer(
            loaded.model,
            mesh,
            tokenizer=loaded.tokenizer,
            settings=ScoringSettings(row_tokens=row_tokens),
            advance=self._progress.advance,
        )

    @property
    def eot_token_id(self) -> int:
        """Every document begins with it, and so does every prompt."""
        return self._loaded.tokenizer.eot_id

    @property
    def max_length(self) -> int | None:
        """Tokens of a prompt; None: any number."""
        return self._context or longest_context(self._run.config)

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval caches its requests."""
        return self._loaded.tokenizer.sha256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, none added; ``_answer`` begins documents."""
        return self._loaded.tokenizer.encode(string)

    def get_model_info(self) -> dict[str, Any]:
        """Metadata that lm-eval writes beside its results."""
        return {"run": str(self._run.directory.path), "step": self._loaded.step, "layout": self._mesh.axes}

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, is greedy) of each continuation."""
        return self._answer("loglikelihood", [request.args for request in requests])

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Of ((context, continuation), ids of the context, ids of the continuation)."""
        return self._answer_requests(
            "loglikelihood",
            [
                LogLikelihood(context=self._encoder.begin(before), continuation=self._encoder.begin(behind)[1:])
                for _, before, behind in requests
            ],
        )

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, in windows where the context is bounded."""
        return self._answer("loglikelihood_rolling", [request.args for request in requests])

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The most probable text behind each context."""
        return self._answer("generate_until", [request.args for request in requests])

    def _answer(self, kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        encoder, window = self._encoder, self.max_length
        return self._answer_requests(kind, [request_of(kind, one, encoder, window=window) for one in arguments])

    def _answer_requests(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        check_lengths(kind, requests, self._run, self._context)
        total = sum(map(num_tokens, requests))
        self._progress.begin(kind, total, resumed=0, requests=len(requests))
        self._progress.begin_block(total)
        answers = self._scorer.answer(requests)
        self._progress.end()
        return list(map(answered, answers))
