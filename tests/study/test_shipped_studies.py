"""The studies in configs/studies: every cell is a run that would start, and is the one that the papers describe."""

import pytest

from lightscale.config.files import flat, load
from lightscale.config.shipped import STUDIES, study_names
from lightscale.models.accounting import parameter_terms
from lightscale.models.specs.options import LightNetOptions
from lightscale.planning.published import TABLE_1, TABLE_7, Symbols
from lightscale.study.cells import Cell, make_cells
from lightscale.study.counts import count
from lightscale.study.definition import read_definition
from lightscale.study.published import TABLE_5, TABLE_6


def cells(name: str) -> dict[str, Cell]:
    return {cell.name: cell for cell in make_cells(read_definition(STUDIES / f"{name}.toml"))}


def test_the_shipped_studies_are_those() -> None:
    names = ["ablation-two-cores", "aspect-ratio", "aspect-ratio-two-cores", "characters-two-cores", "context-length"]
    names += ["eight-mixers-two-cores", "listops-two-cores", "masked-two-cores", "scaling-law", "search-two-cores"]
    assert study_names() == [*names, "two-cores"]


def test_the_ablation_switches_one_thing_at_a_time() -> None:
    found = [cell.config.model.layer_options(0).model_dump() for cell in cells("ablation-two-cores").values()]
    usual = LightNetOptions().model_dump()
    switched = [{key: value for key, value in options.items() if value != usual[key]} for options in found]
    forms: list[dict[str, bool]] = [
        {},
        *({key: False} for key in ("decay", "lrpe", "tpe", "output_norm", "shared_decay")),
    ]
    assert sorted(map(str, switched)) == sorted(map(str, 2 * [*forms, {"full_rank_gate": True}]))


def test_small_aspect_ratios_have_equal_parameters() -> None:
    found = list(cells("aspect-ratio-two-cores").values())
    assert len(found) == 2 * 4 * 3
    for cell in found:
        assert count(cell.config).parameters == pytest.approx(0.222e6, rel=0.08), cell.name


def test_models_that_read_characters_are_of_one_size() -> None:
    found = list(cells("characters-two-cores").values())
    assert len(found) == 4 and {cell.config.model.vocab_size for cell in found} == {136}
    for cell in found:
        assert count(cell.config).parameters == pytest.approx(77.5e3, rel=0.05), cell.name


def test_eight_mixers_read_the_same_data_by_one_recipe() -> None:
    found = cells("eight-mixers-two-cores")
    assert len(found) == 8 * 4 * 3
    of_data: dict[str, list[Cell]] = {}
    for cell in found.values():
        of_data.setdefault(cell.values["data"], []).append(cell)
        assert count(cell.config).parameters == pytest.approx(110e3, rel=0.1), cell.name
    assert of_data.keys() == {"code", "help", "recall", "copying"}
    for same in of_data.values():
        assert len({cell.config.model.mixer for cell in same if isinstance(cell.config.model.mixer, str)}) == 8
        assert len({(cell.config.total_steps, str(cell.config.data), str(cell.config.optimizer)) for cell in same}) == 1


def test_studies_of_both_directions_give_all_the_same_recipe() -> None:
    masked, listops = cells("masked-two-cores"), cells("listops-two-cores")
    assert {cell.config.task.name for cell in masked.values()} == {"masked"}
    assert {cell.config.task.name for cell in listops.values()} == {"classify"}
    for found, models in ((masked, 5), (listops, 3)):
        assert len(found) == models * 3
        assert len({(cell.config.total_steps, cell.config.tokens_per_step) for cell in found.values()}) == 1
        assert len({str(cell.config.optimizer) for cell in found.values()}) == 1


def test_the_scaling_law_study_has_the_shipped_runs() -> None:
    found = cells("scaling-law")
    names = {f"{architecture}-{size}" for architecture in (*TABLE_7, "lightnet") for size in TABLE_7["tnl"]}
    assert set(found) == names
    for name, cell in found.items():
        assert flat(cell.config) == flat(load(name)), name


def test_a_run_of_7b_keeps_what_its_recipe_says() -> None:
    counts = count(cells("scaling-law")["tnl-7b"].config)
    # 57 of the weights alone, 4 bytes a parameter; of the full ones, with two moments, one: without checkpoint.every
    # only the last step is sure.
    parameters = counts.parameters + counts.embedding
    assert counts.kept_bytes == parameters * (57 * 4 + 12)


def test_a_branch_keeps_what_its_own_steps_leave() -> None:
    """Behind step 1000: 3 full ones (1010, 1020, 1025), of which 2 stay; weights of 1010 and 1020; an export."""
    words = ("train.branch_from=runs/parent@1000", "train.steps=1025", "train.tokens=none", "checkpoint.every=10")
    kept = ("checkpoint.keep_every=500", "checkpoint.keep_weights_every=10", "checkpoint.export_every=25")
    counts = count(load("tnl-70m", [*words, *kept]))
    assert counts.kept_bytes == (counts.parameters + counts.embedding) * (2 * 12 + 2 * 4 + 2)


def test_aspect_ratio_is_table_5() -> None:
    found = {
        (cell.architecture, cell.config.model.hidden_size, cell.config.model.num_layers)
        for cell in cells("aspect-ratio").values()
    }
    assert found == {(one.architecture, one.hidden_size, one.num_layers) for one in TABLE_5}
    for cell in cells("aspect-ratio").values():
        assert count(cell.config).parameters == pytest.approx(0.92e9, rel=0.04)
        assert cell.config.model.head_dim == 128


def test_context_length_is_table_6() -> None:
    found = cells("context-length").values()
    lengths = {(cell.architecture, cell.config.data.sequence_length) for cell in found}
    assert lengths == {(one.architecture, one.sequence_length) for one in TABLE_6}
    assert {cell.config.tokens_per_step for cell in found} == {480 * 8192}


def test_two_cores_is_small_and_whole() -> None:
    found = cells("two-cores")
    main = [cell for cell in found.values() if cell.part == "main"]
    assert len(main) == 5 * 5 * 2
    assert {cell.architecture for cell in main} == {"tnl", "hgrn2", "cosformer2", "lightnet", "llama"}
    assert all(10_000 <= count(cell.config).parameters <= 500_000 for cell in main)
    # A sweep of its own for every architecture.
    assert len({cell.choice for cell in found.values() if cell.part == "sweep"}) == 5


def test_a_search_of_two_cores_gives_each_mixer_the_same_trials() -> None:
    found = cells("search-two-cores")
    rates: dict[str, list[float]] = {}
    for cell in found.values():
        rates.setdefault(cell.architecture, []).append(cell.config.optimizer.lr)
        assert count(cell.config).parameters == pytest.approx(85e3, rel=0.05), cell.name
    assert rates["tnl"] == rates["hgrn2"] == rates["llama"] and len(set(rates["tnl"])) == 12


def test_lightnets_own_recipes() -> None:
    """Table 11 of arXiv 2405.21022, and the sizes in its Tables 4 and 5."""
    config = load("lightnet-wikitext103")
    optimizer, train = config.optimizer, config.train
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.lr) == ("inverse_sqrt", 4000, 5e-4)
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay, optimizer.grad_clip) == ((0.9, 0.999), 1e-8, 0.1, 0)
    assert (train.steps, train.global_batch_size, config.data.sequence_length) == (50_000, 128, 512)
    assert sum(parameter_terms(config.model).values()) == pytest.approx(45.07e6, rel=0.001)
    large = load("lightnet-paper-380m")
    assert sum(parameter_terms(large.model).values()) == pytest.approx(379e6, rel=0.002)
    assert large.train.tokens == 10_000_000_000


@pytest.mark.parametrize("architecture", TABLE_1)
def test_closed_forms_of_table_1_are_near_table_7(architecture: str) -> None:
    """They take g for 8/3 d; LLaMA's FLOPs at 7B are then exactly those that the paper prints."""
    config = load(f"{architecture}-7b")
    symbols = Symbols.of(config.model, n=8192, batch=480)
    form, published = TABLE_1[architecture], TABLE_7[architecture]["7b"]
    assert form.count_parameters(symbols) / 1e6 == pytest.approx(published.parameters_millions, rel=0.006)
    assert form.count_flops(symbols) / 1e15 == pytest.approx(published.step_petaflops, abs=0.06)
