import json

from headrace.studies.markup import Html, el, join, json_script


def test_text_is_escaped_and_markup_is_not():
    assert el("p", "<b>", Html("<b></b>"), 3, None, ["&", []]) == "<p>&lt;b&gt;<b></b>3&amp;</p>"


def test_attributes_are_escaped_left_out_or_bare():
    made = el("a", title='"<x>', data_chart="{}", class_="c", hidden=True, open=False, id=None)
    assert made == '<a title="&quot;&lt;x&gt;" data-chart="{}" class="c" hidden></a>'


def test_empty_html_elements_have_no_end_tag_and_those_of_svg_do():
    assert el("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert el("path", d="M0 0") == '<path d="M0 0"></path>'


def test_joined_text_is_escaped():
    assert join(["<", Html("<br>")]) == "&lt;<br>"


def test_nothing_in_data_can_end_its_element():
    data = {"text": "</script><!-- <script> & \u2028"}
    script = json_script("it", data)
    body = script.removeprefix('<script type="application/json" id="it">').removesuffix("</script>")
    assert not set("<>&\u2028") & set(body)
    assert json.loads(body) == data
