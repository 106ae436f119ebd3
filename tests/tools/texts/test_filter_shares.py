"""``tools/texts/filter_shares.py`` and the texts that it reads: the documents, and the rows of the table."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

CHINESE = (
    "清晨的港口笼罩着一层薄雾，渔船缓缓驶出码头，发动机的声音在水面上回荡。\n"
    "老城区的街道狭窄而弯曲，两旁的店铺卖着面包、茶叶和各种干货。\n"
)
COMMANDS = "".join(
    f"命令{n}：lightscale-data-prepare --executor=processes --keep-removed=removed{n}。\n" for n in range(3)
)
RULES_OF_TABLE = "+----+----+\n"


def test_a_row_has_what_was_kept_before_and_now(
    texts_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import filter_shares

    texts = [
        CHINESE,  # by both
        CHINESE + COMMANDS,  # long words
        CHINESE.replace("，", ",").replace("。", ".").replace("、", ","),  # marks of half width
        CHINESE.replace("\n", "\n" + RULES_OF_TABLE) + RULES_OF_TABLE * 2,  # repeated lines
        "太短。",
        " \n",  # nothing
    ]
    lines = "".join(json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(texts))
    (tmp_path / "zh-man.jsonl").write_text(lines, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["filter_shares.py", str(tmp_path), "zh-man", "--json", "--dropped", "3"])
    assert filter_shares.main() == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["zh-man"] == {
        "source": "manual pages",
        "documents": 5,
        "kept_before": 0.2,
        "kept": 0.8,
        "kept_of_long": 1.0,
        "dropped": {"size": 0.2},
    }
    assert err == "--- zh-man: size 2.000, 3 characters\n太短。\n"
    monkeypatch.setattr("sys.argv", ["filter_shares.py", str(tmp_path), "zh-man"])
    assert filter_shares.main() == 0
    assert "| manual pages | 5 | 0.200 | 0.800 | 1.000 | `size` 0.200 |\n" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["filter_shares.py", str(tmp_path), "zh-men"])
    with pytest.raises(SystemExit, match="2"):
        filter_shares.main()
    assert "zh-men: use some of en, zh, " in capsys.readouterr().err


def test_documents_are_what_a_reader_sees(texts_path: Path, tmp_path: Path, needs: Callable[..., None]) -> None:
    import real_text

    (tmp_path / "poems").write_text("\x1b[32m《送别》\x1b[m\n下马饮君酒。\n%\n\n%\n100 %\n不是分隔\n", encoding="utf-8")
    (tmp_path / "poems.dat").write_bytes(b"\xff")
    assert list(real_text._fortunes(tmp_path)) == [
        ("poems/0", "《送别》\n下马饮君酒。"),
        ("poems/2", "100 %\n不是分隔"),
    ]
    (tmp_path / "a.html").write_text(
        "<head><title>x</title></head><body><nav>菜单</nav><p>一<b>段</b></p>二<br>三<footer>页脚</footer></body>"
    )
    assert list(real_text._pages(tmp_path)) == [("a.html", "一段\n二\n三")]
    needs("groff")  # sets manual pages
    manual = '.TH X 1\n.SH 名称\nx \\- 一个\\fB程序\\fR\n.\\" a comment\n.PP\n第一行\n第二行\n'
    (tmp_path / "x.1.gz").write_bytes(gzip.compress(manual.encode()))
    (tmp_path / "y.1.gz").write_bytes(gzip.compress(b".so man1/x.1\n"))
    (tmp_path / "z.1.gz").symlink_to("x.1.gz")
    ((name, page),) = real_text._manual_pages(tmp_path)
    assert name == "x.1.gz"
    assert page.splitlines()[1:-1] == ["", "名称", "x - 一个程序", "", "第一行 第二行", ""]
