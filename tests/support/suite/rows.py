"""Which rows of the large tables the verbs run.

`make test` runs the rows of QUICK: a test, and patterns of the ids of its rows; with none all its rows are left out.
What is not named here is quick. A claim keeps a quick row, unless all its rows take two CPU seconds: then
`make test-all` has one. Rows that say the most stay: several axes at once, the states that are the most different.

Of what QUICK leaves out `make test-all` runs the rows that a mutant names (tests/mutants), those of FULL, and the first
row of a test that would have none. `make prove-all` runs the others.
"""

FULL = {
    "checkpoints/test_checkpoint.py": {
        "test_a_checkpoint_goes_on_in_another_layout": "gemma-4-moe-True",
    },
    "checkpoints/test_checkpoint_read.py": {
        "test_every_family_in_every_style": "*-stacked",
    },
    "checkpoints/test_convert_back.py": {
        "test_both_ways_are_certified": "gemma-4-moe",
    },
    "checkpoints/test_disk_faults.py": {
        "test_one_checkpoint_that_fails_does_not_end_a_run": "steps_that_fail0-0",
    },
    "checkpoints/test_mcore_to_hf.py": {
        "test_parts_of_every_family_in_every_style": "*-stacked",
    },
    "checkpoints/test_multimodal.py": {
        "test_without_what_is_beside_it_a_text_model_is_written": "mistral",
    },
    "checkpoints/test_resume.py": {
        "test_a_damaged_newest_checkpoint_is_passed_over": "isoloss.json",
        "test_the_status_of_a_run_that_was_told_to_end": "*",
    },
    "cli/test_hang.py": {
        "test_the_rank_that_keeps_the_others_waiting_is_named": "sleep",
    },
    "cli/test_sft.py": {
        "test_the_token_budget_decides_neither_rows_nor_loss": "truncate",
    },
    "cli/test_silent_trouble.py": {
        "test_a_step_above_a_limit_is_not_applied": "tp2+pp2",
        "test_all_that_hold_a_weight_hold_the_same": "distopt-*",
    },
    "numerics/test_bf16.py": {
        "test_gradients_in_bf16_follow_fp32": "tp2-False-by?the?hook",
        "test_no_layout_loses_the_fp32_copy_of_the_weights": "tp2",
    },
    "numerics/test_covering.py": {
        "test_every_pair": "*",
    },
    "numerics/test_delta_invariance.py": {
        "test_degrees_of_three": "ring3",
    },
    "numerics/test_dense_and_experts.py": {
        "test_every_layout": "ulysses2+ep2 tp2+etp2",
        "test_recomputed_activations": "*-experts tp2+ep2-full",
    },
    # The length of messages between experts is where gradients get lost in silence.
    "numerics/test_dispatch_bound.py": {
        "test_a_bound_changes_no_number": "ep2+dp2-* pp2+ep2-* tp4+ep2-none-1.0",
    },
    "numerics/test_experts.py": {
        "test_a_gpus_way_is_the_cpus": "pp2* *-full",
    },
    "numerics/test_invariance.py": {
        "test_every_layout": "tp2+pp2+vpp2+ring2",
        "test_twenty_fp32_steps": "dp2-True",
    },
    "numerics/test_joint_norm.py": {
        "test_a_compiler_makes_one_kernel": "joint_norm_backward",
    },
    "numerics/test_moe_invariance.py": {
        "test_every_layout": "qwen3-moe-tp2+ep2+etp2+dp2",
    },
    "numerics/test_param_gather.py": {
        "test_steps_are_those_of_weights_gathered_by_megatron": "*",
    },
    "numerics/test_shared_prefixes.py": {
        "test_activations_that_are_computed_again": "linear-ulysses2+ring2",
        "test_experts_windows_sinks_and_latent_attention": "tp2+ep2-gpt-oss",
        "test_linear_attention": "pp2+vpp2",
    },
    "numerics/test_weight_gradients.py": {
        "test_products_that_add_give_what_the_sum_of_gradients_gives": "*",
    },
    "rl/test_megatron_backend.py": {
        "test_any_layout_gives_the_same_tokens": "deepseek-v3-* gemma-4-moe-*",
        "test_the_tokens_are_those_of_transformers": "minimax-m2 qwen3-next mistral-4",
    },
    "rl/test_rl_layouts.py": {
        "test_a_run_is_the_same_on_any_layout": "pp2",
        "test_generation_is_asked_for_once_a_batch": "dp2-dynamic_sampling*",
    },
    "rl/test_rl_phases.py": {
        "test_killed_at_a_moment_of_a_step": "in?a?save,?all* told*",
    },
    "rl/test_rl_resume.py": {
        "test_resume_is_exact": "critic",
    },
    "sglang/test_adapter_layouts.py": {
        "test_servers_compute_with_the_adapter_of_every_layout": "*",
    },
    "sglang/test_ahead.py": {
        "test_ahead_of_the_trainer": "*-2",
        "test_groups_that_finish_first": "*",
        "test_it_goes_on_where_it_was": "*",
    },
    # By a stand-in and by a real server.
    "sglang/test_backend.py": {
        "test_a_killed_server_is_restarted_and_synced_again": "*",
        "test_an_update_in_the_middle_of_a_completion": "*",
        "test_an_update_is_what_the_server_then_serves": "*",
        "test_each_completion_is_told_of_when_it_ends": "*",
        "test_logprobs_are_those_of_the_whole_vocabulary": "*",
    },
    "sglang/test_survival.py": {
        "test_servers_that_die_in_a_batch_and_come_back_by_themselves": "2-1",
    },
    "te/test_te_layouts.py": {
        "test_every_layout_takes_the_same_step": "qwen3-moe-4-tp2+ep2",
    },
    "unit/test_activations.py": {
        "test_a_compiler_makes_one_kernel_of_each_that_loses_no_more": "geglu",
    },
    "unit/test_grouped_experts.py": {
        "test_a_compiler_makes_one_kernel": "backward",
    },
    "unit/test_norm.py": {
        "test_a_compiler_makes_one_kernel_that_rounds_only_its_result": "offset_norm",
    },
    "unit/test_process_group.py": {
        "test_who_joined_leaves_at_the_end_but_not_after_an_exception": "-True",
    },
}

QUICK = {
    "checkpoints/test_asynchronous.py": {
        "test_a_run_keeps_its_copies": "",
        "test_a_step_after_it_was_taken_does_not_change_it": "2-fp32-parallel0",
    },
    "checkpoints/test_checkpoint.py": {
        "test_a_checkpoint_goes_on_in_another_layout": "",
        "test_a_checkpoint_is_a_model_to_start_from": "",
        "test_a_damaged_file_is_named_on_every_rank": "flip",
        "test_files_are_those_of_megatrons_own_strategy": "",
    },
    "checkpoints/test_checkpoint_read.py": {
        "test_any_rows_of_a_tensor_are_those_of_the_file": "tp2",
        "test_every_family_in_every_style": "qwen3-stacked deepseek-v3-* gpt-oss-stacked minimax-m2-stacked "
        "gemma-4-stacked qwen3.5-moe-stacked",
        "test_experts_and_tensors_on_different_ranks": "gpt-oss-*",
        "test_layouts": "",
    },
    "checkpoints/test_checkpoint_shares.py": {
        "test_every_rank_writes_reads_and_holds_its_own_part": "",
        "test_the_files_are_those_of_a_gather_in_other_pieces": "",
    },
    "checkpoints/test_convert.py": {
        "test_a_conversion": "",
        "test_a_mistake_ends_the_command_with_status_2": "",
        "test_killed_at_fifty_points_the_target_is_absent_or_complete_and_the_second_run_finishes": "",
        "test_the_command_killed_while_it_writes_goes_on_when_started_again": "",
    },
    "checkpoints/test_convert_back.py": {
        "test_a_checkpoint_trained_at_tp2_pp2": "",
        "test_another_type": "",
        "test_both_ways_are_certified": "glm-4.5 gpt-oss llama",
        "test_plain_megatron_core": "llama",
    },
    "checkpoints/test_converted.py": {
        "test_a_converted_checkpoint_loads_in_every_layout": "qwen3-moe-ep2",
    },
    "checkpoints/test_converted_names.py": {
        "test_megatron_with_transformer_engine_loads_it": "",
        "test_names_shapes_types_and_chunks_are_those_that_megatron_writes": "qwen2 mixtral deepseek-v3 glm-4.5 "
        "gpt-oss",
    },
    "checkpoints/test_disk_faults.py": {
        "test_a_disk_that_fails_amid_a_tensor_is_named": "",
        "test_a_disk_that_fails_at_any_operation_leaves_the_checkpoint_before": "",
        "test_dead_at_any_operation_a_whole_checkpoint_is_the_newest": "",
        "test_killed_for_good": "",
        "test_one_checkpoint_that_fails_does_not_end_a_run": "",
        "test_whatever_a_disk_refuses_at_the_start_is_one_line": "32",
    },
    "checkpoints/test_hf_to_mcore.py": {
        "test_another_dtype": "deepseek-v3-bfloat16 llama-float16 gpt-oss-float32",
    },
    "checkpoints/test_hostile_checkpoints.py": {
        "test_metadata_that_is_harmless_at_first": "1 3",
    },
    "checkpoints/test_mcore_to_hf.py": {
        "test_memory_does_not_grow_with_the_number_of_experts": "",
        "test_no_tensor_is_in_memory_as_a_whole": "",
        "test_parts_of_every_family_in_every_style": "qwen3-* deepseek-v3-stacked gpt-oss-per-layer "
        "minimax-m2-singleton gemma-4-stacked qwen3.5-moe-stacked",
        "test_parts_of_every_layout": "*tp2+pp2*-singleton qwen3-pp2-stacked",
        "test_parts_of_experts_apart": "gpt-oss-singleton gpt-oss-stacked qwen3-moe-stacked",
        "test_plain_megatron_core_into_the_files_that_were_published": "tp2-* tp2+pp2*-True",
        "test_there_and_back_again": "*-True-dtype1 llama-False-dtype0",
        "test_tied_embeddings_there_and_back_again": "qwen2 deepseek-v3 gpt-oss",
    },
    "checkpoints/test_multimodal.py": {
        "test_a_trained_one_keeps_its_tower_and_types": "",
        "test_without_what_is_beside_it_a_text_model_is_written": "",
    },
    "checkpoints/test_resume.py": {
        "test_a_damaged_newest_checkpoint_is_passed_over": "",
        "test_a_finished_run_can_be_made_longer": "",
        "test_a_kill_while_saving": "",
        "test_a_part_of_one_rank_is_missed_by_all": "",
        "test_a_run_goes_on_beside_a_copy_of_a_checkpoint": "",
        "test_a_run_of_which_all_checkpoints_are_damaged_ends": "",
        "test_a_run_that_is_told_to_end_saves_first": "",
        "test_another_architecture_is_another_run": "",
        "test_other_rows_are_another_run": "answer tokenizer truncate",
        "test_resume_is_exact": "",
        "test_resume_on_another_layout": "",
        "test_the_optimizer_cannot_be_switched": "to?plainopt",
        "test_the_same_rows_elsewhere_are_the_same_run": "",
        "test_the_status_of_a_run_that_was_told_to_end": "",
        "test_weighted_files_on_another_layout_and_after_a_kill": "",
    },
    "checkpoints/test_transfer.py": {
        "test_a_disk_that_fails_at_any_operation_ends_the_run_in_one_line": "",
        "test_killed_at_any_operation_the_target_is_absent_or_complete_and_the_next_run_finishes": "",
    },
    "cli/test_benchmarks.py": {
        "test_shared_prefixes": "full",
    },
    "cli/test_elastic.py": {
        "test_a_job_that_is_told_to_end_is_not_started_again": "",
    },
    "cli/test_hang.py": {
        "test_a_process_that_moves_lives_and_one_that_does_not_ends": "",
        "test_the_rank_that_keeps_the_others_waiting_is_named": "",
    },
    "cli/test_install.py": {
        "test_a_recipe_runs_from_a_wheel": "",
    },
    "cli/test_killed.py": {
        "test_the_output_of_a_job_ends_with_a_rank_that_is_killed_after_a_checkpoint": "",
    },
    "cli/test_minimal_sft.py": {
        "test_the_recipe_and_its_readable_twin_are_a_plain_loop": "",
    },
    "cli/test_mistakes.py": {
        "test_bad_rows_can_be_left_out": "",
        "test_two_ranks_say_it_once": "",
    },
    "cli/test_plan.py": {
        "test_a_plan_from_the_command_line": "",
        "test_what_does_not_fit_has_status_1": "",
    },
    "cli/test_profile.py": {
        "test_a_disk_that_refuses_it_does_not_end_the_run": "",
        "test_a_step_of_grpo": "",
        "test_a_step_of_sft": "",
    },
    "cli/test_rl_mistakes.py": {
        "test_two_ranks_say_it_once": "",
    },
    "cli/test_sft.py": {
        "test_a_spoiled_step_leaves_no_trace": "masks-dp2-distopt",
        "test_a_step_with_a_nan_is_not_applied": "",
        "test_overlapped_reduction_changes_nothing": "",
        "test_planned_and_measured_memory_are_told_after_the_first_step": "",
        "test_steps_in_several_calls_reduce_in_the_end_whatever_is_configured": "dp2",
        "test_the_token_budget_decides_neither_rows_nor_loss": "",
        "test_tiny_preset": "",
        "test_two_calls_before_a_step_equal_one": "1 tp2+pp2",
    },
    "cli/test_sft_numbers.py": {
        "test_a_run_is_that_of_a_plain_loop": "",
        "test_more_steps_stretch_the_schedule": "",
        "test_the_export_has_the_type_of_config_json": "fp32-bfloat16 bf16-bfloat16 fp64-bfloat16",
        "test_weight_decay_of_a_resumed_run_is_the_configured_one": "",
    },
    "cli/test_silent_trouble.py": {
        "test_a_rank_that_is_slow_is_named": "",
        "test_a_step_above_a_limit_is_not_applied": "dp2",
        "test_all_that_hold_a_weight_hold_the_same": "distopt-dp2+tp2",
        "test_no_checkpoint_holds_weights_that_differ": "100-2",
        "test_the_samples_of_a_spike_are_named": "False",
    },
    "cli/test_torchrun.py": {
        "test_a_job_that_is_told_to_end_leaves_nothing_but_what_resumes": "",
        "test_a_rank_that_is_killed_is_started_again_and_goes_on": "",
        "test_reinforcement_learning_on_two_ranks": "",
        "test_sft_on_two_ranks": "",
    },
    "docs/test_cluster.py": {
        "test_a_run_goes_on_with_the_keys_that_it_began_with": "",
        "test_what_the_page_launches": "",
    },
    "mutants/test_catalogue.py": {
        "test_a_crash_at_import_is_no_kill": "",
        "test_a_mutant_is_pinned_to_the_cheapest_row_that_notices": "",
        "test_a_test_of_slow_rows_alone_is_refused": "",
        "test_the_runner_tells_killed_from_survived": "",
    },
    "mutants/test_fresh.py": {
        "test_each_is_judged_by_the_rows_that_come_by": "",
    },
    "numerics/test_bf16.py": {
        "test_gradients_in_bf16_follow_fp32": "",
        "test_no_layout_loses_the_fp32_copy_of_the_weights": "",
    },
    "numerics/test_covering.py": {
        "test_every_pair": "",
        "test_every_triple": "",
        "test_the_rows_hold_what_they_claim": "",
    },
    "numerics/test_delta_invariance.py": {
        "test_degrees_of_three": "",
        "test_every_layout": "pp2+vpp2 tp2+nosp",
        "test_losses_of_reinforcement_learning": "tp2+pp2",
        "test_recomputed_activations": "pp2+vpp2-memory1",
    },
    "numerics/test_dense_and_experts.py": {
        "test_every_layout": "ep2+dp2 tp2+pp2+ep2",
        "test_recomputed_activations": "tp2+ep2-moe",
    },
    "numerics/test_device_lint.py": {
        "test_nothing_is_refused_and_nothing_more_is_waited_for": "experts",
    },
    "numerics/test_dispatch_bound.py": {
        "test_a_bound_changes_no_number": "ep2+dp2-none-1.0 ep2+dp2-selective-1.0_0 ep2+dp2-selective-1.0_1",
        "test_balance_counts_once": "2.0",
        "test_nothing_is_waited_for": "",
    },
    "numerics/test_dryrun.py": {
        "test_norms_are_counted_as_torch_runs_them_on_a_gpu": "",
    },
    "numerics/test_experts.py": {
        "test_a_gpus_way_is_the_cpus": "1-* tp2+ep2+etp2+dp2-none ulysses2*",
    },
    "numerics/test_gemma_invariance.py": {
        "test_every_layout": "",
        "test_losses_of_reinforcement_learning": "",
        "test_recomputed_activations": "",
    },
    "numerics/test_invariance.py": {
        "test_every_layout": "dp2",
        "test_fewer_tokens_than_ranks": "dp4 pp2+vpp2 ring4",
        "test_one_all_reduce_of_counts_a_step": "96-1 96-dp4 96-ulysses2+dp2",
        "test_recomputed_activations": "full-1",
        "test_sequence_parallel_1_2_and_8_give_the_same_numbers": "",
        "test_the_loss_is_its_definition": "1 dp4",
        "test_the_order_of_the_samples_does_not_matter": "",
        "test_tied_embeddings_biases_and_few_kv_heads": "",
        "test_twenty_fp32_steps": "",
        "test_uneven_stages": "pp3 pp2+vpp2",
    },
    "numerics/test_joint_norm.py": {
        "test_a_compiler_makes_one_kernel": "",
    },
    "numerics/test_memory_estimate.py": {
        "test_it_gives_what_a_dry_run_counts": "",
    },
    "numerics/test_moe_invariance.py": {
        "test_a_bug_planted_into_the_counts_fails_where_it_shows": "",
        "test_a_planted_bug_fails_where_it_shows_and_only_there": "balance-*-tp2+ep2",
        "test_biases_survive_a_checkpoint": "",
        "test_every_layout": "",
        "test_fewer_sequences_than_ranks": "ep4+dp4",
        "test_reinforcement_learning": "",
        "test_selection_biases_are_bit_equal": "",
        "test_the_gradient_is_the_slope_of_the_logged_loss": "",
        "test_what_is_computed_again_counts_once": "all-parts-tp2+ep2+dp2",
    },
    "numerics/test_odd_degrees.py": {
        "test_loss_and_gradients_are_those_of_one_rank": "tp3",
        "test_steps_are_those_of_one_rank": "dp3",
    },
    "numerics/test_offload.py": {
        "test_a_checkpoint_before_the_first_step_goes_on": "qwen3*",
        "test_a_checkpoint_goes_on_with_another_share": "qwen3-1.0-0.3-dp2",
        "test_it_takes_the_same_steps": "qwen3-dp2-0.3",
    },
    "numerics/test_optimizer_choice.py": {
        "test_torchs_adamw_runs_also_where_another_one_is_installed": "",
    },
    "numerics/test_param_gather.py": {
        "test_steps_are_those_of_weights_gathered_by_megatron": "qwen2-dp2-* qwen3-dp2-bf16-none-late "
        "qwen3-dp2-fp32-none-gloo's",
    },
    "numerics/test_presets_fit.py": {
        "test_a_model_of_all_layers_peaks_where_few_layers_say": "",
        "test_a_plan_knows_what_is_kept_in_cpu_memory": "",
        "test_every_stage_fits": "",
        "test_what_a_preset_claims_is_what_the_search_says": "sft/*",
    },
    "numerics/test_prove.py": {
        "test_a_planted_bug_fails_where_it_shows_and_only_there": "",
        "test_a_planted_bug_that_cannot_show_is_refused": "expert-* loads-*",
        "test_a_proof_of_a_policy_loss": "",
        "test_a_proof_on_the_shipped_model_and_data": "",
        "test_budgets_come_from_the_data": "",
    },
    "numerics/test_recompute.py": {
        "test_every_module_saves_memory": "qwen3-core_attn qwen3-mlp_act qwen3-moe-moe qwen3-moe-experts",
        "test_every_rank_saves_memory": "",
        "test_no_gradient_changes": "1-qwen2-* 1-gpt-oss-* 1-ministral-3-* 4-qwen2-full",
    },
    "numerics/test_rl_invariance.py": {
        "test_a_planted_bug_fails_where_it_shows_and_only_there": "",
        "test_critic": "",
        "test_critic_that_recomputes_its_activations": "1",
        "test_every_layout": "",
        "test_on_policy_where_the_loss_cancels": "",
        "test_the_batch_reaches_every_branch": "",
    },
    "numerics/test_shared_prefixes.py": {
        "test_activations_that_are_computed_again": "dense-1",
        "test_every_layout": "",
        "test_experts_windows_sinks_and_latent_attention": "",
        "test_linear_attention": "",
        "test_logprobs_of_a_forward_alone": "dp4",
    },
    "numerics/test_transformers_parity.py": {
        "test_an_exported_model_is_the_trained_one": "qwen3-1",
        "test_layouts_give_the_logits_and_gradients_of_one_rank": "llama-tp2+pp2 qwen2-tp2+nosp qwen3-moe-tp2+ep2 "
        "gpt-oss-tp2+ep2 glm-4.5-pp2 minimax-m2-tp2+ep2 mimo-v2-flash-tp2+ep2",
        "test_logits_are_those_of_transformers": "qwen3 gpt-oss deepseek-v3",
        "test_logprobs_are_those_of_transformers": "qwen2",
        "test_long_documents_and_a_vocabulary_in_chunks": "mistral",
    },
    "numerics/test_weight_gradients.py": {
        "test_products_that_add_give_what_the_sum_of_gradients_gives": "deepseek-v3-1-*",
    },
    "parallel/test_attention.py": {
        "test_a_grid_of_ranks_equals_dense_attention": "",
        "test_a_ring_over_documents_of_many_blocks_of_queries": "",
        "test_ulysses_attention_equals_dense_attention": "8-2-4-* 12-3-4-1 6-3-3-2 8-8-2-0 8-2-2-0 8-1-2-0 6-3-2-0 "
        "6-2-2-0 6-6-2-0 8-8-4-0 8-4-4-0 8-1-4-0 12-3-4-0 12-6-4-0 4-2-4-0 6-6-3-0 6-3-3-0 6-2-3-0 6-1-3-0",
    },
    "parallel/test_cuda_stubs.py": {
        "test_factories_still_obey_a_device_context": "",
    },
    "parallel/test_prefetch.py": {
        "test_one_row_is_packed_ahead_and_nothing_else_changes": "pp2+vpp2",
    },
    "parallel/test_processes.py": {
        "test_helpers_end_with_an_owner_that_is_killed": "",
    },
    "parallel/test_rank_pool.py": {
        "test_a_computation_may_take_longer_than_silence": "",
        "test_a_world_that_hangs_tells_where_each_rank_is": "",
    },
    "parallel/test_uneven_stages.py": {
        "test_a_checkpoint_goes_on_in_other_stages": "",
        "test_the_export_and_the_stream_name_every_layer": "",
    },
    "parallel/test_warm.py": {
        "test_a_warm_command_is_a_cold_one": "True",
    },
    "rl/test_colocated.py": {
        "test_everything_is_bit_equal": "",
    },
    "rl/test_critic.py": {
        "test_the_first_value_loss_is_that_of_values_of_0": "",
    },
    "rl/test_distribute.py": {
        "test_a_rank_has_what_it_computes": "1-* dp2-* pp2+dp2-False",
    },
    "rl/test_generation.py": {
        "test_any_concurrency_and_sampling": "*-3",
        "test_rows_are_as_if_alone": "llama deepseek-v3",
        "test_tokens_are_as_frequent_as_they_are_probable": "1.0-1.0--1",
    },
    "rl/test_grpo_demo.py": {
        "*": "",
    },
    "rl/test_in_process.py": {
        "test_completions_are_the_same_on_any_number_of_ranks": "1",
        "test_log_probabilities_are_the_trainers_after_every_sync": "",
        "test_pause_resume_and_abort_reach_every_rank": "llama-1-{}-transformers llama-2-{}-transformers",
        "test_the_model_is_the_one_that_transformers_loads": "*-dtype0 llama-* gpt-oss-dtype1",
    },
    "rl/test_leaving.py": {
        "test_an_exception_on_the_way_loses_nothing": "leaving-2 *back-2 *back-12",
        "test_an_optimizer_in_cpu_memory_comes_back_too": "",
        "test_five_cycles_are_bit_equal_and_leave_nothing_behind": "",
    },
    "rl/test_loop_numbers.py": {
        "test_old_and_reference_probabilities_are_those_of_their_weights_at_the_temperature": "1 2",
    },
    "rl/test_megatron_backend.py": {
        "test_any_layout_gives_the_same_tokens": "gemma-4-*pp*",
        "test_the_tokens_are_those_of_transformers": "llama gemma-4",
    },
    "rl/test_minimal_rl.py": {
        "test_the_recipe": "",
        "test_the_readable_loop_on_one_rank": "",
        "test_the_readable_loop_on_two_ranks": "",
    },
    "rl/test_own_functions.py": {
        "test_prove_judges_a_loss_of_ones_own": "",
    },
    "rl/test_reference.py": {
        "test_on_a_gpu_the_host_waits_for_no_piece": "",
    },
    "rl/test_reward.py": {
        "test_a_failure_costs_its_own_completion_only": "ends",
        "test_a_hundred_faults_cost_their_completions_their_rewards_and_nothing_else": "",
        "test_nothing_is_left_behind": "",
    },
    "rl/test_rl_bad_rewards.py": {
        "test_a_batched_reward_of_the_wrong_length": "long-9",
        "test_a_reward_that_fails_is_counted_and_masked": "nan* word* crash*",
        "test_dynamic_sampling_that_finds_nothing": "",
        "test_groups_without_variance_teach_exactly_nothing": "",
        "test_masked_means_as_if_it_had_never_been_generated": "",
        "test_rewards_that_all_fail": "False",
    },
    "rl/test_rl_layouts.py": {
        "test_a_rollout_and_the_trainer_agree_on_every_token": "",
        "test_a_run_is_the_same_on_any_layout": "",
        "test_a_step_of_fewer_completions_than_ranks": "",
        "test_generation_is_asked_for_once_a_batch": "",
        "test_weights_that_are_not_sent_are_seen": "1",
    },
    "rl/test_rl_mixture.py": {
        "test_a_run_that_was_killed_goes_on_with_the_same_prompts": "",
        "test_any_layout_draws_the_same_prompts": "",
        "test_groups_that_are_dropped_count_as_drawn_on_another_layout_too": "",
    },
    "rl/test_rl_phases.py": {
        "test_killed_at_a_moment_of_a_step": "",
    },
    "rl/test_rl_resume.py": {
        "test_a_kill_between_the_checkpoints_of_critic_and_policy": "",
        "test_another_reference_is_another_run": "",
        "test_knobs_of_the_loss_alone_may_change": "",
        "test_other_prompts_are_another_run": "vocabulary",
        "test_resume_is_exact": "",
        "test_resume_is_exact_on_every_layout": "",
        "test_the_same_prompts_elsewhere_are_the_same_run": "",
        "test_what_was_dropped_and_drawn_again_is_the_same": "",
    },
    "rl/test_weight_stream.py": {
        "test_every_tensor_arrives_once": "llama-1* qwen2-2-* qwen3-2-* deepseek-v3-* gpt-oss-2-*",
    },
    "sglang/test_adapter_layouts.py": {
        "test_servers_compute_with_the_adapter_of_every_layout": "*'tp':?2}-tensor-*",
    },
    "sglang/test_adapter_runs.py": {
        "test_a_server_that_answers_by_the_model_shows_in_the_first_batch_after_a_step": "",
        "test_a_server_that_dies_in_a_batch_gets_the_adapter_when_it_is_back": "",
    },
    "sglang/test_adapters.py": {
        "test_a_server_that_is_killed_during_an_update": "",
        "test_an_adapter_that_changes_on_its_way_is_not_served": "",
        "test_answers_to_a_load_that_say_nothing": "",
    },
    "sglang/test_ahead.py": {
        "test_ahead_of_the_trainer": "",
        "test_every_rank_has_the_ledger": "",
        "test_groups_that_finish_first": "",
        "test_it_goes_on_where_it_was": "",
        "test_on_policy_in_waves_nothing_changes_but_rounding": "",
    },
    "sglang/test_backend.py": {
        "test_a_killed_server_is_restarted_and_synced_again": "",
        "test_an_update_in_the_middle_of_a_completion": "*broadcast",
        "test_an_update_is_what_the_server_then_serves": "*broadcast",
        "test_each_completion_is_told_of_when_it_ends": "",
        "test_logprobs_are_those_of_the_whole_vocabulary": "*-0.6-1.0--1 *-1.0-*",
    },
    "sglang/test_families.py": {
        "test_what_the_trainer_sends_is_what_the_server_has": "qwen3-moe gpt-oss",
    },
    "sglang/test_faults.py": {
        "test_a_dead_server_passes_its_requests_on": "",
        "test_a_server_that_comes_late_is_waited_for": "",
        "test_a_server_that_dies_in_an_update_ends_it": "",
        "test_all_servers_are_updated_and_share_the_work": "",
        "test_every_rank_hears_of_everything": "broadcast",
        "test_servers_that_end_with_other_weights_are_told": "",
    },
    "sglang/test_lies.py": {
        "test_no_lie_becomes_a_sample": "",
    },
    "sglang/test_recipe.py": {
        "test_a_server_that_is_not_there_is_one_line_and_status_2": "",
        "test_grpo_through_a_server_that_the_recipe_starts": "",
        "test_two_ranks_share_a_server": "",
    },
    "sglang/test_senders.py": {
        "test_weights_go_through_no_other_rank": "qwen2-2-{'pp':?2}-2-()",
    },
    "sglang/test_survival.py": {
        "test_a_router_that_asks_for_a_key_ends_the_batch": "",
        "test_a_run_without_trouble_counts_nothing": "",
        "test_a_server_that_asks_for_a_key_names_ours": "",
        "test_servers_and_router_are_sent_the_key": "",
        "test_servers_that_die_in_a_batch_and_come_back_by_themselves": "",
        "test_the_key_is_in_no_file_and_no_output": "",
    },
    "te/test_te_layouts.py": {
        "test_a_checkpoint_goes_on_alike_in_both": "qwen2-*TE",
        "test_every_family_takes_the_same_step": "qwen2 qwen3 mixtral deepseek-v3 gpt-oss",
        "test_every_layout_takes_the_same_step": "qwen3-2-* gpt-oss-*",
        "test_losses_of_routers_do_not_count_the_padding_of_the_kernels": "glm-4.5-*",
        "test_transformer_engines_attention_takes_the_same_step": "mixtral-1-* qwen2-yarn-* llama-4-* ministral-3-*",
    },
    "unit/test_activations.py": {
        "test_a_compiler_makes_one_kernel_of_each_that_loses_no_more": "",
    },
    "unit/test_block_attention.py": {
        "test_documents_that_share_what_they_begin_with_are_dense_attention": "",
        "test_two_sets_of_keys_are_merged_by_two_kernels": "",
    },
    "unit/test_grouped_experts.py": {
        "test_a_compiler_makes_one_kernel": "",
    },
    "unit/test_matmul.py": {
        "test_megatrons_layers_take_them": "",
    },
    "unit/test_norm.py": {
        "test_a_compiler_makes_one_kernel_that_rounds_only_its_result": "",
    },
    "unit/test_prefix_scan.py": {
        "test_any_forest": "",
    },
    "unit/test_preset_layouts.py": {
        "test_a_preset_is_what_its_first_lines_say": "sft/*",
        "test_a_preset_says_what_it_keeps_in_cpu_memory": "sft/*",
        "test_layers_are_computed_again_only_where_it_is_said": "sft/*",
    },
    "unit/test_process_group.py": {
        "test_who_joined_leaves_at_the_end_but_not_after_an_exception": "",
    },
    "unit/test_residual_norm.py": {
        "test_a_compiler_makes_one_kernel_each_way_that_loses_no_more": "",
    },
    "unit/test_rotary.py": {
        "test_a_compiler_makes_one_kernel_that_loses_no_more": "",
    },
    "unit/test_rules.py": {
        "test_every_key_and_module_of_a_rule_in_a_loop_is_refused": "",
        "test_every_rule_is_broken_by_some_row": "",
        "test_the_first_override_is_what_is_refused": "",
        "test_what_is_not_refused_megatron_builds": "latent tied gpt-oss moe mistral mistral4 delta minimax-m2 "
        "mimo-v2-flash gemma-4",
    },
    "unit/test_search.py": {
        "test_experts_are_divided_too": "",
        "test_memory_of_the_host_is_taken_where_that_is_faster": "",
    },
    "unit/test_tiny.py": {
        "test_unigram_baseline": "",
    },
    "unit/test_loss_head.py": {
        "test_a_chunk_of_logits_is_passed_over_by_one_kernel_each_way": "",
    },
}
