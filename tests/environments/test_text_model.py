"""What `config.json` must say before a prompt is shown to a model, and prompts of a user's own environment."""

from __future__ import annotations

import json

import pytest

from colchis.components.environments import Prompt, TextModel, Tokenizer, check_prompts
from colchis.components.environments.opening import generate_rows
from colchis.components.errors import BadConfig, BadData
from colchis.components.records.rows import Row, Rows, Split
from tests.rollout.conftest import character_tokenizer


@pytest.fixture
def folder(tmp_path):
    character_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, text):
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def test_sizes_come_from_the_model(folder):
    model = TextModel.from_folder(write(folder, json.dumps({"vocab_size": 60, "max_position_embeddings": 48})))
    assert (model.vocabulary_size, model.context_tokens) == (60, 48)
    assert [model.longest_tokens(n) for n in (32, 4096)] == [32, 48]


def test_a_model_that_names_no_context_has_no_limit_of_its_own(folder):
    assert TextModel.from_folder(write(folder, '{"vocab_size": 60}')).longest_tokens(4096) == 4096


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "expected an object, found list"),
        ("{", "cannot be read as JSON"),
        ("{}", "vocab_size is None, expected a positive integer"),
        ('{"vocab_size": "60"}', "vocab_size is '60'"),
        ('{"vocab_size": true}', "vocab_size is True"),
        ('{"vocab_size": 60, "max_position_embeddings": 0}', "max_position_embeddings is 0"),
    ],
)
def test_a_configuration_that_is_none_is_refused_by_its_field(folder, text, says):
    with pytest.raises(BadConfig, match=says) as caught:
        TextModel.from_folder(write(folder, text))
    assert str(folder / "config.json") in str(caught.value)


def test_a_folder_without_configuration_is_refused(folder):
    with pytest.raises(BadConfig, match=r"no config\.json .*Hugging Face folder"):
        TextModel.from_folder(folder)


class Odd:
    """An environment whose episodes begin with what the test says."""

    version = "1"

    def __init__(self, begin):
        self.begin = begin

    def start(self, row, seed):
        return self

    def prompt(self):
        return self.begin()


@pytest.mark.parametrize("begin", [lambda: 1 / 0, lambda: None, lambda: 7, lambda: ["a"], lambda: [None]])
def test_what_an_environment_returns_instead_of_a_prompt_is_its_own_fault(begin):
    rows = Rows([Row(i, f"{i}+1=", "2", split, {}) for i, split in enumerate(Split)])
    model = TextModel(Tokenizer(character_tokenizer()), 60)
    with pytest.raises(BadData, match="row 0: the environment cannot start"):
        check_prompts(Odd(begin), rows, model, longest_tokens=40)


def test_a_prompt_that_is_no_prompt_is_named(own_environment):
    config = own_environment(lambda: ["1+1="])
    with pytest.raises(BadData, match=r"row 0: expected a Prompt, found str .*environment 'odd'"):
        generate_rows(config)
    assert generate_rows(own_environment(lambda: [Prompt(str(i)) for i in range(200)]))


@pytest.fixture
def own_environment(monkeypatch):
    """own_environment(prompts) -> the configuration of an environment that has them."""
    from colchis.components.config import OwnEnvironmentConfig
    from colchis.components.environments import opening

    def make(prompts):
        class Own(Odd):
            def prompts(self):
                return prompts()

        monkeypatch.setattr(opening, "_own", lambda config: Own(None))
        return OwnEnvironmentConfig(kind="own", name="odd")

    return make
