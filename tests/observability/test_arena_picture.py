"""The picture's data from a trace made by hand, and the page in a real browser."""

import json
import re
import shutil
import subprocess

import pytest
from click.testing import CliRunner

from lamella.cli import cli
from lamella.errors import ConfigError
from lamella.observability.arena_picture import draw_arena, read_story

LAYOUT = {
    "title": "tiny <model>", "num_slabs": 9, "slab_bytes": 4096,
    "groups": [{"name": "sliding_16", "pages_per_slab": 1, "is_windowed": True},
               {"name": "full", "pages_per_slab": 2, "is_windowed": False}],
}  # fmt: skip


def instant(name, ts, **args):
    return {"ph": "i", "name": name, "ts": ts, "args": args}


EVENTS = [
    instant("arena layout", 0.0, **LAYOUT),
    {"ph": "b", "name": "queued", "id": "a", "ts": 0.0},
    {"ph": "e", "name": "queued", "id": "a", "ts": 100.0},
    {"ph": "b", "name": "decode", "id": "a", "ts": 100.0},
    instant("prefix hit", 100.0, request="a", tokens=32, prompt_tokens=40),
    instant("arena", 200.0, changes=[[1, 0, "a"], [2, 1, "a"]]),
    instant("windows slid", 400.0, rows=3),
    instant("spare pages evicted", 450.0, pages=2),
    instant("arena", 500.0, changes=[[1, -1, None], [2, 1, None], [3, 0, "</script><b>"]]),
    {"ph": "X", "name": "step", "ts": 600.0, "dur": 400.0},
]


def test_pieces_end_where_slabs_change_hands():
    story = read_story(EVENTS, "trace.json")
    assert story.requests == ["a", "</script><b>"]
    assert story.slabs == [
        [1, 200.0, 500.0, 0, 0], [2, 200.0, 500.0, 1, 0], [2, 500.0, 1000.0, 1, None], [3, 500.0, 1000.0, 0, 1],
    ]  # fmt: skip
    assert story.phases == [[0, 0, 0.0, 100.0], [0, 2, 100.0, 1000.0]]
    assert story.hits == [[100.0, 0, 32, 40]]
    assert story.slides == [[400.0, 3]]
    assert story.evictions == [[450.0, "spare pages evicted", 2]]


def test_a_trace_without_kv_memory_is_refused():
    with pytest.raises(ConfigError, match="tells of no KV memory"):
        read_story([{"ph": "X", "name": "step", "ts": 1.0, "dur": 1.0}], "trace.json")


@pytest.fixture
def page(tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text("[\n" + ",\n".join(map(json.dumps, EVENTS)))
    result = CliRunner().invoke(cli, ["trace-picture", str(trace)])
    assert result.exit_code == 0, result.output
    assert "2 requests, 1 prefix hits" in result.output
    return tmp_path / "trace.html"


def test_the_page_needs_nothing_from_elsewhere_and_no_name_ends_its_data(page):
    text = page.read_text()
    assert not re.search(r"https?:|src=|@import|url\(", text)
    assert text.count("</script>") == 2  # of the data and of the code
    assert "tiny &lt;model&gt;" in text


@pytest.mark.browser
def test_what_a_browser_shows(page, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium is not None, "no browser: install Debian's chromium"
    from PIL import Image

    def browse(address, *arguments):
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
        command = [chromium, *flags, "--window-size=1000,600", *arguments, address.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    # A copy that points at the middle of each box that is drawn and notes what the page says there.
    asks = tmp_path / "asks.html"
    script = """<script>{
    const place = canvas.getBoundingClientRect(), said = document.createElement("ul");
    said.id = "said";
    for (const [left, top, right, bottom] of boxes.slice()) {
      canvas.dispatchEvent(new MouseEvent("mousemove", {
        clientX: place.left + (left + right) / 2, clientY: place.top + (top + bottom) / 2, bubbles: true }));
      const item = document.createElement("li");
      item.textContent = [left, top, right, bottom].map(Math.round) + "|" + hover.textContent.replaceAll("\\n", "; ");
      said.append(item);
    }
    said.dataset.top = place.top; said.dataset.left = place.left;
    document.body.append(said);
    }</script></body>"""
    asks.write_text(page.read_text().replace("</body>", script))
    dom = browse(asks, "--dump-dom")
    said = re.findall(r"<li>([\d,]+)\|(.*?)</li>", dom)
    texts = [text for _, text in said]
    assert "a: decode; 100 µs to 1.00 ms" in texts
    assert "a found 32 of 40 prompt tokens; at 100 µs" in texts
    assert "3 window slides; by 400 µs" in texts
    assert "spare pages evicted: 2; by 450 µs" in texts
    assert "slab 1, group sliding_16; used by a; 200 µs to 500 µs" in texts
    assert "slab 2, group full; cached, no request uses it; 500 µs to 1.00 ms" in texts
    assert "slab 3, group sliding_16; used by &lt;/script&gt;&lt;b&gt;; 500 µs to 1.00 ms" in texts
    legend = re.findall(r'class="entry".*?</span>(.*?)</span>', dom)
    assert legend[:3] == ["group sliding_16", "group full", "cached, no request uses it"]
    assert "8 slabs of 4,096 B, 3 of them used; 2 requests, 1 prefix hits, 3 window slides" in dom

    picture = tmp_path / "picture.png"
    browse(page, f"--screenshot={picture}")
    pixels = Image.open(picture).convert("RGB")
    top, left = (float(re.search(rf'data-{name}="([\d.]+)"', dom)[1]) for name in ("top", "left"))

    def colour_of(text):
        box = next(box for box, one in said if one.startswith(text))
        x0, y0, x1, y1 = map(int, box.split(","))
        return pixels.getpixel((round(left + (x0 + x1) / 2), round(top + (y0 + y1) / 2)))

    assert colour_of("slab 2, group full; cached") == (0xDF, 0xE3, 0xE8)
    assert colour_of("a: decode") == (0x3D, 0x9A, 0x50)
    assert colour_of("a found 32") == (0x0A, 0x7D, 0x3C)
    assert colour_of("slab 1,") == colour_of("slab 2, group full; used by a") != colour_of("slab 3,")


def test_a_picture_that_cannot_be_written_is_refused(tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text("[\n" + ",\n".join(map(json.dumps, EVENTS)) + "\n]\n")
    with pytest.raises(ConfigError, match=r"output=.*cannot be written"):
        draw_arena(trace, tmp_path / "none" / "page.html")
