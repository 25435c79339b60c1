from pathlib import Path

import pytest

from finetune.errors import ConfigError, ModelError
from finetune.model.tokenizer import load_tokenizer


def test_a_tokenizer_is_asked_for_where_none_is_known() -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer: null"):
        load_tokenizer(None)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer in"):
        load_tokenizer(str(tmp_path))
