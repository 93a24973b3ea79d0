"""Mutations of `tools/train/`: what a restart continues from, what a step averages, and what ranks agree on."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_ONE_RANK = "tools/train/test_one_rank.py"
_FILES = "tools/train/test_checkpoint_files.py"
_BATCHES = "tools/train/test_batches.py"
_RATE = "tools/train/test_optimizer.py"

MUTATIONS = (
    Mutation(
        "load a checkpoint whose digest is another",
        "tools/train/checkpoint_files.py",
        'path.stem.startswith("step-") and digest_of',
        'path.stem.startswith("best") and digest_of',
        f"{_FILES}::test_a_change_of_any_byte_is_noticed",
    ),
    Mutation(
        "start anew when the newest checkpoint is damaged",
        "tools/train/checkpoint_files.py",
        '                _log.warning("%s is skipped: %s", path, reason)\n',
        '                _log.warning("%s is skipped: %s", path, reason)\n                return None\n',
        f"{_FILES}::test_a_damaged_checkpoint_is_skipped_with_a_warning",
    ),
    Mutation(
        "give a file its name before its bytes are on the disk",
        "tools/train/checkpoint_files.py",
        "            os.fsync(file.fileno())\n",
        "",
        f"{_FILES}::test_the_bytes_are_on_the_disk_before_they_get_the_name",
    ),
    Mutation(
        "leave half a file on a full disk",
        "tools/train/checkpoint_files.py",
        "        part.unlink(missing_ok=True)  # on a full disk, let others have the space\n",
        "",
        f"{_FILES}::test_a_failed_write_leaves_the_old_file",
    ),
    Mutation(
        "write a state that the optimizer changes meanwhile",
        "tools/train/checkpoint_files.py",
        "copy=True",
        "copy=False",
        f"{_FILES}::test_what_is_written_in_the_background_is_the_state_at_the_call",
    ),
    Mutation(
        "keep one checkpoint too few",
        "tools/train/checkpoint_files.py",
        "self.paths()[self._keep :]",
        "self.paths()[self._keep - 1 :]",
        f"{_FILES}::test_the_last_few_and_the_best_are_kept",
    ),
    Mutation(
        "continue with samples that were seen",
        "tools/train/batches.py",
        "return -(-self.position.samples // self._samples_at_once)",
        "return self.position.samples // self._samples_at_once",
        f"{_BATCHES}::test_another_number_of_ranks_goes_on_behind_the_samples_that_were_seen",
    ),
    Mutation(
        "forget set_epoch",
        "tools/train/batches.py",
        "self._loader.set_epoch(self.position.epoch)",
        "self._loader.set_epoch(0)",
        f"{_BATCHES}::test_every_epoch_has_an_order_of_its_own",
    ),
    Mutation(
        "validate samples on every rank",
        "tools/train/batches.py",
        "[share::num_shares]",
        "[share:]",
        f"{_BATCHES}::test_validation_shares_cover_each_sample_once",
    ),
    Mutation(
        "forget the scale of the loss",
        "tools/train/trainer.py",
        '        self.precision.scaler.load_state_dict(state["scaler"])\n',
        "",
        f"{_ONE_RANK}::test_what_is_restored_goes_on_to_the_same_bits",
    ),
    Mutation(
        "forget the random state",
        "tools/train/trainer.py",
        "            torch.set_rng_state(of_cpu)\n",
        "",
        f"{_ONE_RANK}::test_what_is_restored_goes_on_to_the_same_bits",
    ),
    Mutation(
        "clip before averaging",
        "tools/train/trainer.py",
        "                    self.precision.backward(loss / passes)\n",
        "                    self.precision.backward(loss / passes)\n"
        "                    nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm or 1e9)\n",
        f"{_ONE_RANK}::test_the_norm_is_that_of_the_whole_gradient_before_it_is_clipped",
    ),
    Mutation(
        "sum the accumulated passes",
        "tools/train/trainer.py",
        "self.precision.backward(loss / passes)",
        "self.precision.backward(loss)",
        f"{_ONE_RANK}::test_accumulated_passes_are_a_mean",
    ),
    Mutation(
        "clip scaled gradients",
        "tools/train/precision.py",
        "        self.scaler.unscale_(optimizer)\n",
        "",
        f"{_ONE_RANK}::test_gradients_are_clipped_without_the_loss_scale",
    ),
    Mutation(
        "take a mean of means",
        "tools/train/metrics.py",
        "self.sums[share] += means * targets.numel()",
        "self.sums[share] += means",
        f"{_ONE_RANK}::test_a_mean_counts_targets",
    ),
    Mutation(
        "log a step twice after a restart",
        "tools/train/metrics.py",
        'json.loads(line)["step"] <= step]',
        'json.loads(line)["step"] <= step + 10]',
        "tools/train/test_metrics.py::test_a_resumed_log_forgets_what_will_be_written_again",
    ),
    Mutation(
        "leave the rate as it is for one rank",
        "tools/train/optimizer.py",
        "    times = num_shares * settings.accumulate\n",
        "    times = settings.accumulate\n",
        f"{_RATE}::test_the_rate_scales_with_the_global_batch",
    ),
    Mutation(
        "start without warm-up",
        "tools/train/optimizer.py",
        "    warm_up = min(1.0, (step + 1) / (settings.warmup_steps + 1))\n",
        "    warm_up = 1.0\n",
        f"{_RATE}::test_warm_up_rises_linearly_to_the_peak",
    ),
    Mutation(
        "decay by steps alone",
        "tools/train/optimizer.py",
        "SCHEDULES[settings.schedule](done)",
        "SCHEDULES[settings.schedule](step)",
        f"{_RATE}::test_the_decay_by_progress",
    ),
    Mutation(
        "hear no other rank's refusal",
        "tools/train/world.py",
        "        if by_text:\n",
        "        if ours:\n",
        f"{_ONE_RANK}::test_an_error_of_another_rank_is_raised_here",
    ),
    Mutation(
        "continue from rank 0's checkpoint although another is newer",
        "tools/train/checkpoint.py",
        "steps.index(max(steps))",
        "0",
        f"{_ONE_RANK}::test_the_newest_checkpoint_of_any_rank_is_given_to_all",
    ),
    Mutation(
        "start over an old run unasked",
        "tools/train/checkpoint.py",
        'settings.resume == "no" and files.paths() and not settings.overwrite',
        "False",
        f"{_ONE_RANK}::test_an_old_run_is_neither_continued_nor_discarded_unasked",
    ),
    Mutation(
        "continue a run of other settings",
        "tools/train/checkpoint.py",
        "for name in now if now[name] != then.get(name)",
        "for name in now if now[name] != then.get(name, now[name])",
        f"{_ONE_RANK}::test_an_old_run_is_neither_continued_nor_discarded_unasked",
    ),
    Mutation(
        "end for good on any signal",
        "tools/train/launch.py",
        "is_to_go_on = stopped.signal_name in REQUEUE_SIGNALS",
        "is_to_go_on = False",
        f"{_ONE_RANK}::test_the_status_says_whether_to_start_the_run_again",
    ),
    Mutation(
        "discard the run at each restart",
        "tools/train/launch.py",
        '*(word for word in arguments if word != "--overwrite")',
        "*arguments",
        f"{_ONE_RANK}::test_ranks_that_are_started_again_continue",
    ),
    Mutation(
        "train on after a signal",
        "tools/train/stop.py",
        "    if verdict.signal_number:\n",
        "    if False:\n",
        "tools/train/test_stop.py::test_reasons_to_end",
    ),
    Mutation(
        "read SLURM's tasks of the first node",
        "tools/train/cluster.py",
        '["SLURM_STEP_TASKS_PER_NODE"])[node]',
        '["SLURM_STEP_TASKS_PER_NODE"])[0]',
        "tools/train/test_cluster.py::test_a_task_of_srun_knows_its_rank",
    ),
)
