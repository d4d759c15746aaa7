"""`python -m launch.choose` as people call it (DEC-23), on a model that was never trained."""

import json

from tests.launch import session
from tests.launch.helpers import save_run
from tests.training.helpers import experiment, model_config, tiny_data


def test_questions_from_a_file(tmp_path):
    save_run(tmp_path / "run", experiment(tiny_data(tmp_path / "data"), model_config("parallel", num_layers=1)))
    items = tmp_path / "items.jsonl"
    items.write_text('{"context": "def ", "choices": ["f(x)", "12"], "answer": 0}\n' * 3)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"context": "def "}\n')
    output = tmp_path / "found.json"
    good, bad = session.calls(
        "choose",
        [
            [f"--checkpoint={tmp_path / 'run'}", f"--items={items}", f"--output={output}"],
            [f"--checkpoint={tmp_path / 'run'}", f"--items={broken}"],
        ],
    )
    assert good.code == 0, good.stderr
    assert "3 items" in good.stdout
    assert "guessing gets 50.0%" in good.stdout
    found = json.loads(output.read_text())
    assert [len(one) for one in found["log_probabilities"]] == [2, 2, 2]
    assert found["accuracy"] in (0.0, 1.0)  # one question, three times
    assert bad.code == 1
    assert "broken.jsonl:1: wanted" in bad.stderr
    assert "Traceback" not in bad.stderr
