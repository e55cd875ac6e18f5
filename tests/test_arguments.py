"""Arguments and YAML files to configuration: what is accepted, and one clear line for what is not."""

import dataclasses

import pytest

from dflash_jax.arguments import (
    build,
    describe,
    find_named,
    leaves,
    parse_assignments,
    read_yaml,
    run_entry_point,
)
from dflash_jax.config import MeshLayout, PrepareConfig, Recipe
from dflash_jax.errors import UserError

REQUIRED = ["target.path=model", "data.train=train.jsonl", "mesh=one", "out=runs/a"]


def recipe(*arguments):
    return build(
        Recipe, [("the file", parse_assignments(REQUIRED)), ("command line", parse_assignments(arguments))]
    )


def test_values_reach_their_keys_with_their_types():
    found = recipe(
        "drafter.layers=3",
        "drafter.taps=[1,2,5]",
        "drafter.mask_token=null",
        "drafter.is_causal=false",
        "drafter.rope_theta=10000",
        "optim.lr=1e-3",
        "data.buckets=[64]",
        "data.template.enable_thinking=false",
        "target.path=a=b",
        "objective.gamma=7",
    )
    assert found.drafter.layers == 3
    assert found.drafter.taps == [1, 2, 5]
    assert found.drafter.mask_token is None
    assert found.drafter.is_causal is False
    assert found.drafter.rope_theta == 10000.0
    assert isinstance(found.drafter.rope_theta, float)
    assert found.optim.lr == 1e-3
    assert found.data.buckets == [64]
    assert found.data.template == {"enable_thinking": False}
    assert found.target.path == "a=b"
    assert found.objective.gamma == 7.0
    assert found.train.epochs == Recipe().train.epochs


def test_the_command_line_wins_over_the_file_key_by_key():
    file = {"optim": {"lr": 1.0, "b2": 0.9}, "data": {"buckets": [1, 2, 3]}}
    line = parse_assignments(["optim.lr=0.5", "data.buckets=[7]"])
    found = build(Recipe, [("required", parse_assignments(REQUIRED)), ("file", file), ("command line", line)])
    assert (found.optim.lr, found.optim.b2, found.data.buckets) == (0.5, 0.9, [7])


def test_a_mapping_is_given_whole_or_name_by_name():
    assert recipe().objective.terms is None
    assert recipe("objective.terms.kl=0.5").objective.terms == {"kl": 0.5}
    assert recipe("objective.terms={ce: .5, tv: 2}").objective.terms == {"ce": 0.5, "tv": 2.0}
    both = recipe("objective.terms.ce=1", "objective.terms.lk_hybrid=2").objective.terms
    assert both == {"ce": 1.0, "lk_hybrid": 2.0}
    file = {"objective": {"terms": {"ce": 0.5, "tv": 0.5}}}

    def over_the_file(argument):
        line = parse_assignments([argument])
        sources = [("required", parse_assignments(REQUIRED)), ("file", file), ("command line", line)]
        return build(Recipe, sources).objective.terms

    assert over_the_file("objective.terms.tv=0.25") == {"ce": 0.5, "tv": 0.25}
    assert over_the_file("objective.terms.kl=1") == {"ce": 0.5, "tv": 0.5, "kl": 1.0}
    assert over_the_file("objective.terms=null") is None


def test_configuration_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe().optim.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


WRONG = [
    # argument, what the message must name
    ("optim.learning_rate=1", r"unknown key 'optim\.learning_rate'.*keys of optim: lr, b1"),
    ("optim.warmpu=0.1", r"unknown key 'optim\.warmpu' \(did you mean 'optim\.warmup'\?\)"),
    ("drafter.block_sise=8", r"unknown key 'drafter\.block_sise' \(did you mean 'drafter\.block_size'\?\)"),
    ("drafter.tap=[1]", r"unknown key 'drafter\.tap' \(did you mean 'drafter\.taps'\?\)"),
    ("optin.lr=1", r"unknown key 'optin' \(did you mean 'optim'\?\)"),
    ("targt.path=x", r"unknown key 'targt' \(did you mean 'target'\?\)"),
    ("lr=1", r"unknown key 'lr'.*keys and groups: target, drafter"),
    ("Mesh=one", r"unknown key 'Mesh' \(did you mean 'mesh'\?\)"),
    ("drafter=5", r"drafter is a group of keys, found 5; write drafter\.KEY=value"),
    ("optim=null", r"optim is a group of keys, found null"),
    ("drafter.layers=three", r"command line: drafter\.layers: .*'three'"),
    ("drafter.layers=2.5", r"command line: drafter\.layers: .*2\.5"),
    ("drafter.layers=null", r"command line: drafter\.layers: "),
    ("drafter.layers=0", r"drafter\.layers: found 0, allowed: 1 to 256"),
    ("drafter.block_size=1", r"drafter\.block_size: found 1, allowed: 2 to 256"),
    ("drafter.block_size=257", r"drafter\.block_size: found 257, allowed: 2 to 256"),
    ("drafter.mask_token=-1", r"drafter\.mask_token: found -1, allowed: at least 0"),
    ("drafter.is_causal=maybe", r"command line: drafter\.is_causal: .*'maybe'"),
    ("drafter.taps=[1,x]", r"command line: drafter\.taps(\[1\])?: .*'x'"),
    ("drafter.taps=3", r"command line: drafter\.taps: "),
    (
        "drafter.dtype=float16",
        r"drafter\.dtype: found 'float16' \(did you mean '.*'\?\); allowed: float32, bfloat16",
    ),
    ("target.dtype=bf16", r"target\.dtype: found 'bf16'.*'bfloat16'.*allowed: float32, bfloat16"),
    (
        "optim.schedule=cosin",
        r"optim\.schedule: found 'cosin' \(did you mean 'cosine'\?\); allowed: cosine, wsd, constant",
    ),
    ("optim.schedule=linear", r"optim\.schedule: found 'linear'.*allowed: cosine, wsd, constant"),
    ("optim.b1=1.5", r"optim\.b1: found 1\.5, allowed: 0\.0 to 0\.9999"),
    ("optim.lr=-1", r"optim\.lr: found -1\.0, allowed: at least 0\.0"),
    ("optim.lr=nan", r"optim\.lr: found nan, allowed: at least 0\.0"),
    ("optim.lr=fast", r"command line: optim\.lr: .*'fast'"),
    ("objective.gamma=0", r"objective\.gamma: found 0\.0, allowed: at least 0\.001"),
    ("train.seed=-3", r"train\.seed: found -3, allowed: 0 to 4294967295"),
    ("train.steps=0", r"train\.steps: found 0, allowed: at least 1"),
    ("drafter.taps=512", r"command line: drafter\.taps: "),
    ("drafter.taps=[a]", r"command line: drafter\.taps(\[0\])?: .*'a'"),
    ("data.tokens_per_batch=1k", r"command line: data\.tokens_per_batch: .*'1k'"),
    ("pipeline.read_threads=0", r"pipeline\.read_threads: found 0, allowed: at least 1"),
    ("checkpoint.keep=0", r"checkpoint\.keep: found 0, allowed: at least 1"),
    ("optim.lr.peak=1", r"command line: optim\.lr"),
    ("no_equals_sign", r"argument 'no_equals_sign' is not of the form key=value"),
    ("--steps", r"argument '--steps' is not of the form key=value"),
    ("=3", r"argument '=3' is not of the form key=value"),
    ("optim.lr=[1", r"argument 'optim\.lr=\[1': not valid YAML \("),
    ("optim.lr=${oops}", r"optim\.lr: references such as"),
    ("optim.lr=.inf", r"optim\.lr: found inf, allowed: at least 0"),
    ("optim.b1=1", r"optim\.b1: found 1.0, allowed: 0.0 to 0.9999"),
    ("data.buckets=['${oops}']", r"data\.buckets: references such as"),
    ("data.template={a: '${oops}'}", r"data\.template: references such as"),
    ("data.buckets=[[1]]", r"data\.buckets: found \[1\] in the list, allowed: single values"),
    (
        "drafter.layer_types=[full_attention,sliding]",
        r"drafter\.layer_types: found 'sliding' \(did you mean 'sliding_attention'\?\); allowed: full_attention, ",
    ),
    ("drafter.taps={a: 1}", r"command line: drafter\.taps: found \{'a': 1\}, allowed: a list"),
    ("data.template=[a]", r"command line: data\.template: found \['a'\], allowed: a mapping"),
    # Mappings: names, then values.
    ("objective.terms.lk=1", r"objective\.terms: found 'lk' \(did you mean 'kl'\?\); allowed: ce, kl, "),
    (
        "objective.terms={ce: 1, nla: 1}",
        r"objective\.terms: found 'nla'.*allowed: ce, kl, .*, lk_alpha, lk_hybrid",
    ),
    ("objective.terms.kl=-0.5", r"objective\.terms\.kl: found -0\.5, allowed: at least 1e-06"),
    ("objective.terms.kl=0", r"objective\.terms\.kl: found 0\.0, allowed: at least 1e-06"),
    ("objective.terms.kl=nan", r"objective\.terms\.kl: found nan, allowed: at least 1e-06"),
    ("objective.terms.kl=much", r"command line: objective\.terms\.kl: .*'much'"),
    ("objective.terms.kl=null", r"command line: objective\.terms\.kl: "),
    ("objective.terms.kl.x=1", r"objective\.terms\.kl: found \{'x': 1\}, allowed: a single value"),
    ("objective.terms.kl=${optim.lr}", r"objective\.terms: references such as"),
    ("objective.terms={}", r"objective\.terms: found nothing in it; name at least one of: ce \| kl \| "),
    ("objective.terms=[ce, kl]", r"objective\.terms: found \['ce', 'kl'\], allowed: a mapping"),
    ("objective.terms=ce", r"command line: objective\.terms: "),
    (
        "objective.slot_weights=dpac",
        r"slot_weights: found 'dpac' \(did you mean 'dpace'\?\); allowed: decay, dpace",
    ),
    ("objective.dpace_alpha=0", r"objective\.dpace_alpha: found 0\.0, allowed: 0\.001 to 1\.0"),
    ("objective.noise_peak=-1", r"objective\.noise_peak: found -1\.0, allowed: at least 0\.0"),
    ("objective.noise_schedule=step", r"objective\.noise_schedule: found 'step'.*allowed: linear, cosine"),
]


@pytest.mark.parametrize(("argument", "named"), WRONG)
def test_a_wrong_argument_is_named(argument, named):
    with pytest.raises(UserError, match=named) as error:
        recipe(argument)
    assert "\n" not in str(error.value)


def test_a_key_given_twice_is_refused():
    with pytest.raises(UserError, match=r"key 'optim\.lr' is given twice"):
        recipe("optim.lr=1", "optim.lr=2")


@pytest.mark.parametrize("missing", ["target.path", "data.train", "mesh", "out"])
def test_a_required_key_is_asked_for(missing):
    rest = [argument for argument in REQUIRED if not argument.startswith(missing)]
    with pytest.raises(UserError, match=f"^{missing}: a value is required"):
        build(Recipe, [("command line", parse_assignments(rest))])


def test_the_source_of_a_wrong_key_is_named():
    with pytest.raises(
        UserError, match=r"^recipes/x\.yaml: unknown key 'optim\.rl' \(did you mean 'optim\.lr'\?\)"
    ):
        build(Recipe, [("recipes/x.yaml", {"optim": {"rl": 1}})])


def test_a_mesh_layout_is_read_with_the_same_care():
    tree = {"device_count": 2, "target": {"devices": [0, 1], "axes": {"data": 2}}}
    part = {"devices": [0], "axes": {"data": 1}}
    found = build(MeshLayout, [("m.yaml", tree | {"drafter": part | {"rules": {"mlp": "data"}}})])
    assert found.target.axes == {"data": 2}
    assert found.target.rules == {}
    assert found.drafter.rules == {"mlp": "data"}
    with pytest.raises(UserError, match=r"drafter\.axes: a value is required"):
        build(MeshLayout, [("m.yaml", tree | {"drafter": {"devices": [0]}})])
    with pytest.raises(UserError, match=r"m\.yaml: target\.axes"):
        build(MeshLayout, [("m.yaml", tree | {"target": {"axes": {"data": "two"}}})])
    with pytest.raises(UserError, match=r"m\.yaml: drafter\.rules: found \['mlp'\], allowed: a mapping"):
        build(MeshLayout, [("m.yaml", tree | {"drafter": part | {"rules": ["mlp"]}})])
    with pytest.raises(UserError, match=r"drafter\.axes\.data: found \{'x': 1\}, allowed: a single value"):
        build(MeshLayout, [("m.yaml", tree | {"drafter": part | {"axes": {"data": {"x": 1}}}})])
    with pytest.raises(UserError, match=r"platform: found 'cpus' \(did you mean 'cpu'\?\)"):
        build(MeshLayout, [("m.yaml", tree | {"drafter": part, "platform": "cpus"})])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- 1\n- 2\n", "expected a mapping of keys, found list"),
        ("optim: {lr: 1\n", "not valid YAML"),
        ("a: 1\na: 2\n", "not valid YAML"),
        ("\tx: 1\n", "not valid YAML"),
    ],
)
def test_a_damaged_yaml_file_is_refused_in_one_line(tmp_path, text, named):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"bad\.yaml: {named}") as error:
        read_yaml(file)
    assert "\n" not in str(error.value)


def test_a_yaml_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: cannot be read \(No such file"):
        read_yaml(tmp_path / "none.yaml")


def test_a_name_is_looked_up_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meshes").mkdir()
    (tmp_path / "meshes" / "garage.yaml").write_text("device_count: 1\n")
    found = find_named("meshes", "garage", key="mesh")
    assert read_yaml(found) == {"device_count": 1}
    assert find_named("meshes", str(tmp_path / "meshes" / "garage.yaml"), key="mesh").is_file()
    assert find_named("meshes", "one", key="mesh").is_file()  # one that comes with the package
    with pytest.raises(
        UserError, match=r"mesh: nothing named 'garrage' in meshes/ \(did you mean 'garage'\?\); known:"
    ):
        find_named("meshes", "garrage", key="mesh")
    with pytest.raises(UserError, match=r"mesh: file nowhere\.yaml does not exist"):
        find_named("meshes", "nowhere.yaml", key="mesh")


def test_help_lists_every_key_with_its_meaning():
    text = describe(Recipe)
    for key, _, field in leaves(Recipe()):
        assert f"{key}=" in text
        assert field.metadata["meaning"] in text
    assert "target.path=REQUIRED" in text
    assert "drafter.taps=null" in text
    assert "data.buckets=auto:6  (list or str)" in text
    assert "data.template={}  (dict[str, Any])" in text
    assert "[2 to 256]" in text
    assert "[cosine | wsd | constant]" in text
    assert "objective.terms=null  (dict[str, float] or null)" in text
    assert "[ce | kl | reverse_kl | tv | lk_alpha | lk_hybrid]" in text
    assert "devices=REQUIRED" in describe(MeshLayout)


def test_leaves_name_every_option():
    keys = [key for key, _, _ in leaves(recipe())]
    assert len(keys) == len(set(keys))
    assert {"target.path", "drafter.block_size", "optim.lr", "eval.every", "mesh", "out"} <= set(keys)
    assert not {"target", "optim"} & set(keys)


def test_an_entry_point_reports_a_users_error_in_one_line(monkeypatch, capsys):
    def refuse(arguments):
        raise UserError(f"bad\n  thing {arguments}")

    monkeypatch.setattr("sys.argv", ["train", "a=1"])
    with pytest.raises(SystemExit) as status:
        run_entry_point(refuse, usage="usage", schema=Recipe)
    assert status.value.code == 2
    assert capsys.readouterr().err == "error: bad thing ['a=1']\n"

    monkeypatch.setattr("sys.argv", ["train", "debug=true", "a=1"])
    with pytest.raises(UserError, match=r"\['a=1'\]"):
        run_entry_point(refuse, usage="usage", schema=Recipe)


def test_an_entry_point_passes_its_status_on(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "a=1"])
    with pytest.raises(SystemExit) as status:
        run_entry_point(lambda arguments: len(arguments), usage="usage", schema=Recipe)
    assert status.value.code == 1


def test_help_is_the_usage_and_the_keys(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["prepare", "no assignment", "--help"])
    with pytest.raises(SystemExit) as status:
        run_entry_point(lambda arguments: 7, usage="how to use it", schema=PrepareConfig)
    assert status.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("how to use it\n")
    assert "inspect=0  (int)" in shown


def test_a_span_of_steps_is_text_and_no_number_to_the_base_of_sixty():
    assert parse_assignments(["profile.steps=20:24", "a=3"]) == {"profile": {"steps": "20:24"}, "a": 3}
