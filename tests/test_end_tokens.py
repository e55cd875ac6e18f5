"""The tokens that end an answer, wherever published files name them."""

import json

import gguf
import pytest

from dflash_jax.published.end_tokens import end_tokens


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config.json": {"model_type": "unheard-of", "eos_token_id": 7}}, {7}),
        ({"config.json": {"eos_token_id": None}, "generation_config.json": {"eos_token_id": [5, 9]}}, {5, 9}),
        ({"config.json": {"eos_token_id": [7, 8], "text_config": {"eos_token_id": 3}}}, {3, 7, 8}),
    ],
)
def test_a_folder_names_them_in_its_configurations(tmp_path, files, expected):
    for name, fields in files.items():
        (tmp_path / name).write_text(json.dumps(fields))
    assert end_tokens(tmp_path) == expected


def test_a_gguf_file_may_name_the_ends_of_text_turn_and_message(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_eos_token_id(11)
    writer.add_eot_token_id(12)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 13)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert end_tokens(tmp_path / "model.gguf") == {11, 12, 13}
