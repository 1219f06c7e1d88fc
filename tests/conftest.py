from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from pool import RankPool

SECOND_CASES = [
    "test_failing_anywhere.py::test_under_our_launcher[on_before_optimizer_step-0]",
    "test_failing_anywhere.py::test_under_our_launcher[validation_step-1]",
    "test_failing_anywhere.py::test_under_our_launcher[on_save_checkpoint-0]",
    "test_failing_anywhere.py::test_under_an_agent[writing-1]",
    "test_recipe.py::test_killed_and_resumed_on_another_layout[dp2-1-tp2]",
    "test_recipe.py::test_killed_and_resumed_on_another_layout[single-0-dp2_tp2]",
    "test_stopped_by_a_signal.py::test_under_our_launcher[3-validation_step-single]",
    "test_stopped_by_a_signal.py::test_under_our_launcher[group-on_save_checkpoint-dp2]",
    "test_sharded_linear.py::test_theorems[4]",
    "test_vocab_parallel.py::test_theorems[4]",
    "test_gpt.py::test_gradients_equal_one_process[4-True]",
    "test_chooser_on_ranks.py::test_pipeline[gpt2]",
    "test_chooser_on_ranks.py::test_pipeline[bert]",
    "test_chooser_on_ranks.py::test_pipeline[vit]",
    "test_chooser_on_ranks.py::test_pipeline[resnet]",
    "test_chooser_on_ranks.py::test_both[gpt2]",
    "test_parity.py::test_float64[dp2-llama]",
    "test_parity.py::test_float64[tp2_sp-llama]",
    "test_parity.py::test_float64[tp4-llama]",
    "test_parity.py::test_float64[pp2_gpipe-llama]",
    "test_parity.py::test_float64[pp4-llama]",
    "test_parity.py::test_float64[pp2_zb_h1-llama]",
    "test_parity.py::test_float64[tp2_pp2_zb_h2-llama]",
    "test_parity.py::test_float64[pp2_interleaved-llama]",
    "test_parity.py::test_float64[pp2_zbv-llama]",
    "test_parity.py::test_float64[tp2_pp2_dualpipe_v-llama]",
    "test_parity.py::test_float64[pp3_uneven-llama]",
    "test_parity.py::test_float64[dp2_tp2-llama]",
    "test_parity.py::test_float64[dp2_pp2-llama]",
    "test_parity.py::test_float64[tp2_sp_pp2-llama]",
    "test_parity.py::test_float64[dp2_zero1-llama]",
    "test_parity.py::test_float64[dp2_tp2_zero1-llama]",
    "test_parity.py::test_float64[dp2_pp2_zero1-llama]",
    "test_parity.py::test_microbatches_and_batches_without_a_valid_token[dp2_pp2]",
    "test_parity.py::test_microbatches_and_batches_without_a_valid_token[dp2_pp2_zero1]",
    "test_parity.py::test_accumulation_and_clipping[tp2_pp2]",
    "test_resume.py::test_resume_on_another_layout[single-tp2_pp2-3]",
    "test_resume.py::test_resume_on_another_layout[tp2_pp2-dp2_zero1-7]",
    "test_hugging_face.py::test_in_three_steps_and_out[llama-pp2]",
    "test_hugging_face.py::test_in_three_steps_and_out[gpt2-pp2]",
    "test_hugging_face.py::test_in_three_steps_and_out[mixtral-pp2]",
    "test_hugging_face.py::test_in_three_steps_and_out[llama-tp2]",
    "test_hugging_face.py::test_in_three_steps_and_out[mixtral-dp2_zero1]",
    "test_adapters.py::test_frozen_and_adapted[Filtered-tp2]",
    "test_adapters.py::test_frozen_and_adapted[FirstFrozen-tp2]",
    "test_averaging.py::test_averages_equal_plain_lightning_s[tp2]",
    "test_cli.py::test_by_class_path_and_the_saved_configuration[pipeline]",
    "test_cli.py::test_by_class_path_and_the_saved_configuration[tensor]",
    "test_entry_points.py::test_before_and_after_fit_and_back_to_plain_lightning[tp2]",
    "test_metrics.py::test_metric_objects[dp2_tp2]",
    "test_notebooks.py::test_the_module_is_whole_and_trained_after_each_call[pp2,tp2]",
    "test_optimizers.py::test_groups_by_name[NamedParameters-tp2]",
    "test_optimizers.py::test_groups_by_name[Early-pp2]",
    "test_optimizers.py::test_schedulers[PlateauOfSteps-tp2]",
    "test_optimizers.py::test_schedulers[Warm-pp2]",
    "test_trainer_settings.py::test_settings[validation_intervals-tp2]",
    "test_trainer_settings.py::test_settings[limits-tp2]",
    "test_verify.py::test_tensor_parallelism_of_a_module_without_a_plan",
    "test_tensor_parallel.py::test_every_gradient_equals_one_process[qwen3_next]",
]
"""Cases of which the default run has a sibling; they run with what is slow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    second = set(SECOND_CASES)
    for item in items:
        if item.nodeid.rpartition("/")[2] in second:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()
