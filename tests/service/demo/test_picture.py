"""From the slices that ranks save to the picture of whole rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models

from packhorse import Coordinates
from packhorse_service.demo.demo_picture import draw_packs
from packhorse_service.demo.packs import Place, load_packs, save_slice
from tests.service.demo.rows_by_hand import CONTEXT, DATA, ROWS, VOCABULARY, WIDTH, deal, make_rows, micro_batches


def save_first_step(folder: Path) -> None:
    for data in range(DATA):
        for context in range(CONTEXT):
            coordinates = Coordinates(data=data, context=context, tensor=0, pipeline=0)
            for micro_batch in micro_batches(make_rows(ROWS["full step"]), data, context):
                save_slice(folder, coordinates, micro_batch)


def test_slices_of_all_ranks_make_the_rows_again(tmp_path: Path) -> None:
    save_first_step(tmp_path)
    packs = load_packs(tmp_path)
    dealt = deal(make_rows(ROWS["full step"]))
    assert [pack.place for pack in packs] == [Place(0, data, index) for data in range(2) for index in range(2)]
    for pack in packs:
        row = dealt[pack.place.data][pack.place.index]
        np.testing.assert_array_equal(pack.tokens, row.tokens)
        np.testing.assert_array_equal(pack.loss_mask, row.loss_mask)
        assert [end - start for start, end, _ in pack.segments] == np.diff(row.cu_seqlens).tolist()
        assert pack.segments[-1][2] == WIDTH
        assert np.bincount(pack.holder).tolist() == [WIDTH // 2, WIDTH // 2]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    save_first_step(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({f"${n}": n for n in range(VOCABULARY)}, unk_token="$0"))
    draw_packs(load_packs(tmp_path), tokenizer, tmp_path / "packs.png")
    assert (tmp_path / "packs.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
