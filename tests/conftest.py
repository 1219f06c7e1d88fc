from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from pool import RankPool

SECOND_CASES = {
    "test_whole_zoo_on_ranks.py": [
        "test_kinds[pp2]",
    ],
    "test_adapters.py": [
        "test_compiled_blocks[CompiledAot-tp2]",
        "test_frozen_and_adapted[Filtered-tp2]",
        "test_frozen_and_adapted[FirstFrozen-tp2]",
    ],
    "test_averaging.py": [
        "test_averages_equal_plain_lightning_s[tp2]",
    ],
    "test_chooser_on_ranks.py": [
        "test_both[gpt2]",
        "test_pipeline[bert]",
        "test_pipeline[gpt2]",
        "test_pipeline[resnet]",
        "test_pipeline[vit]",
    ],
    "test_cli.py": [
        "test_by_class_path_and_the_saved_configuration[pipeline]",
        "test_by_class_path_and_the_saved_configuration[tensor]",
    ],
    "test_entry_points.py": [
        "test_before_and_after_fit_and_back_to_plain_lightning[tp2]",
    ],
    "test_failing_anywhere.py": [
        "test_under_an_agent[writing-1]",
        "test_under_our_launcher[configure_model-0]",
        "test_under_our_launcher[on_before_optimizer_step-0]",
        "test_under_our_launcher[on_save_checkpoint-0]",
        "test_under_our_launcher[on_train_batch_start-2]",
        "test_under_our_launcher[on_train_epoch_end-3]",
        "test_under_our_launcher[teardown-2]",
        "test_under_our_launcher[validation_step-1]",
    ],
    "test_gpt.py": [
        "test_fsdp_on_top[True]",
        "test_gradients_equal_one_process[2-False]",
        "test_gradients_equal_one_process[4-True]",
    ],
    "test_hostile_insides.py": [
        "test_logs_are_told_of_once[LogsANumberLater-tp2]",
        "test_logs_are_told_of_once[LogsInValidation-tp2]",
    ],
    "test_hostile_logging.py": [
        "test_every_rank_sees_what_plain_lightning_logs[BestSoFar-dp2]",
        "test_every_rank_sees_what_plain_lightning_logs[BestSoFar-pp2]",
        "test_every_rank_sees_what_plain_lightning_logs[BestSoFar-pp2_zbv]",
        "test_every_rank_sees_what_plain_lightning_logs[Collections-dp2]",
        "test_every_rank_sees_what_plain_lightning_logs[Collections-pp2]",
        "test_every_rank_sees_what_plain_lightning_logs[Collections-tp2]",
        "test_every_rank_sees_what_plain_lightning_logs[Everything-dp2]",
        "test_every_rank_sees_what_plain_lightning_logs[Everything-pp2]",
    ],
    "test_hostile_stacks.py": [
        "test_dropout_around_the_blocks_is_the_same_on_all_stages[pp2_interleaved]",
        "test_dropout_around_the_blocks_is_the_same_on_all_stages[pp4]",
        "test_like_plain_lightning[Between-pp4]",
        "test_like_plain_lightning[Hooks-pp4]",
        "test_like_plain_lightning[InPlaceBetween-pp4]",
        "test_like_plain_lightning[InPlaceFirst-pp4]",
        "test_like_plain_lightning[LayerDrop-pp4]",
        "test_like_plain_lightning[Recomputed-pp4]",
        "test_like_plain_lightning[StateDicts-pp4]",
        "test_like_plain_lightning[TwoStreams-pp4]",
        "test_values_in_a_shared_dict[dp2_pp2_zero1]",
        "test_values_in_a_shared_dict[pp2_interleaved]",
    ],
    "test_hostile_steps.py": [
        "test_a_step_that_writes_into_its_batch[tp2-True]",
        "test_clipping_by_torch_s_function[tp2-ClipsByTorch]",
        "test_clipping_by_torch_s_function[tp2_pp2-ClipsByTorch]",
    ],
    "test_hostile_training.py": [
        "test_all_gather_in_a_step_is_over_the_data_ranks[tp2_pp2]",
    ],
    "test_hugging_face.py": [
        "test_in_three_steps_and_out[gpt2-pp2]",
        "test_in_three_steps_and_out[llama-pp2]",
        "test_in_three_steps_and_out[llama-tp2]",
        "test_in_three_steps_and_out[mixtral-dp2_zero1]",
        "test_in_three_steps_and_out[mixtral-pp2]",
    ],
    "test_metrics.py": [
        "test_metric_objects[dp2_tp2]",
        "test_metric_objects[tp2]",
        "test_sums_count_each_sample_once[tp2]",
    ],
    "test_notebooks.py": [
        "test_parameters_that_a_plan_has_cut_come_back_whole",
        "test_the_module_is_whole_and_trained_after_each_call[pp2,tp2]",
    ],
    "test_optimizers.py": [
        "test_groups_by_name[Early-pp2]",
        "test_groups_by_name[NamedParameters-tp2]",
        "test_schedulers[PlateauOfSteps-tp2]",
        "test_schedulers[Warm-pp2]",
    ],
    "test_parity.py": [
        "test_accumulation_and_clipping[dp2]",
        "test_accumulation_and_clipping[dp2_pp2_zero1]",
        "test_accumulation_and_clipping[single]",
        "test_accumulation_and_clipping[tp2_pp2]",
        "test_adamw_float32[dp2_pp2_zero1]",
        "test_adamw_float32[tp2_sp_pp2]",
        "test_float64[dp2-llama]",
        "test_float64[dp2_pp2-llama]",
        "test_float64[dp2_pp2_zero1-llama]",
        "test_float64[dp2_tp2-llama]",
        "test_float64[dp2_tp2_pp2-llama]",
        "test_float64[dp2_tp2_zero1-gpt2]",
        "test_float64[dp2_tp2_zero1-llama]",
        "test_float64[dp2_zero1-llama]",
        "test_float64[pp2_gpipe-llama]",
        "test_float64[pp2_interleaved-llama]",
        "test_float64[pp2_zb_h1-llama]",
        "test_float64[pp2_zbv-llama]",
        "test_float64[pp3_uneven-llama]",
        "test_float64[pp4-gpt2]",
        "test_float64[pp4-llama]",
        "test_float64[tp2_pp2-llama]",
        "test_float64[tp2_pp2_dualpipe_v-llama]",
        "test_float64[tp2_pp2_zb_h2-llama]",
        "test_float64[tp2_sp-llama]",
        "test_float64[tp2_sp_pp2-llama]",
        "test_float64[tp4-llama]",
        "test_microbatches_and_batches_without_a_valid_token[dp2_pp2]",
        "test_microbatches_and_batches_without_a_valid_token[dp2_pp2_zero1]",
        "test_tied_and_untied[gpt2-False]",
    ],
    "test_plan_on_ranks.py": [
        "test_llama[dp2_tp2_zero1]",
    ],
    "test_pretrain.py": [
        "test_a_run_and_its_continuation_on_another_layout",
        "test_a_sweep_runs_each_job_once_in_a_folder_of_its_own",
    ],
    "test_recipe.py": [
        "test_killed_and_resumed_on_another_layout[dp2-1-tp2]",
        "test_killed_and_resumed_on_another_layout[single-0-dp2_tp2]",
    ],
    "test_resume.py": [
        "test_resume_on_another_layout[pp2-tp2_sp-5]",
        "test_a_plain_lightning_file_goes_on_with_its_optimizer[dp2_zero1]",
        "test_resume_on_another_layout[dp2_zero1-pp2-8]",
        "test_resume_on_another_layout[single-tp2_pp2-3]",
        "test_resume_on_another_layout[tp2_pp2-dp2_zero1-7]",
        "test_resume_on_another_layout[tp2_sp-single-8]",
    ],
    "test_scripts.py": [
        "test_export_opens_in_plain_lightning",
        "test_callbacks_and_loggers_as_in_plain_lightning",
    ],
    "test_sharded_attention.py": [
        "test_attention[3]",
        "test_norms[4]",
    ],
    "test_sharded_linear.py": [
        "test_theorems[3]",
        "test_theorems[4]",
    ],
    "test_stopped_by_a_signal.py": [
        "test_under_an_agent[agent-validation_step]",
        "test_under_our_launcher[3-validation_step-single]",
        "test_under_our_launcher[group-on_save_checkpoint-dp2]",
    ],
    "test_tensor_parallel.py": [
        "test_every_gradient_equals_one_process[qwen3_next]",
    ],
    "test_trainer_settings.py": [
        "test_settings[limits-tp2]",
        "test_settings[validation_intervals-tp2]",
    ],
    "test_verify.py": [
        "test_tensor_parallelism_of_a_module_without_a_plan",
    ],
    "test_vocab_parallel.py": [
        "test_theorems[3]",
        "test_theorems[4]",
    ],
}
"""Cases of which the default run has a sibling; they run with what is slow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file, _, case = item.nodeid.rpartition("/")[2].partition("::")
        if case in SECOND_CASES.get(file, ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    ranks = RankPool(compare_collectives="slow" in request.config.option.markexpr.replace("not slow", ""))
    yield ranks
    ranks.close()
