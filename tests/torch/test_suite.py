"""PyTorch's own distributed tests over the mesh: those that take no time, each in ranks of its own.

``make test-torch-suite`` runs all that there are, over gloo as well. Not here are those that give groups a second to be
made, or to wait in: a busy machine may need longer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tools.torch_suite import PASSED, Outcome, Plan, run

LIMIT = 900.0
"""Seconds for all tests of a plan."""

TESTS = {
    Plan("rankmesh", 2): """
Backend_enum_class DistributedDataParallelCPU accumulate_gradients_no_sync_allreduce_hook all_gather
all_gather_coalesced_complex all_gather_coalesced_with_empty all_gather_complex all_gather_object_subgroup
all_reduce_coalesced_max_complex_unsupported all_reduce_coalesced_sum all_reduce_complex_unsupported_ops
all_reduce_full_group_sum all_reduce_sum_async all_reduce_sum_complex barrier batch_isend_irecv_gloo
batch_isend_irecv_gloo_tags broadcast ddp_create_graph destroy_group gather_checks get_backend get_future
get_rank_size_full_group get_rank_size_group grads_same_across_ranks_with_no_sync isend
monitored_barrier_gloo_rank_0_timeout monitored_barrier_gloo_subgroup reduce_max reduce_sum_twice scatter_checks
scatter_complex scatter_object_list send_recv_any_source send_recv_torch_profiler send_recv_with_tag
sparse_all_reduce_sum static_graph_api_cpu
""",
    Plan("rankmesh", 3, "mpi"): """
all_gather_group all_reduce_group_sum all_to_all_complex all_to_all_group all_to_all_single_equal_split_complex
all_to_all_single_equal_split_group all_to_all_single_unequal_split_complex all_to_all_single_unequal_split_group
barrier_group broadcast_group gather_group reduce_group_sum scatter_group
""",
    Plan("rankmesh", 2, gpus_in_host_memory=True): """
ddp_broadcast_buffer_via_hook ddp_buffer_hook_allreduce_return_future ddp_control_flow_same_across_ranks
ddp_device_mesh_initialization ddp_forward_backward_hook ddp_grad_div_uneven_inputs
ddp_hook_parity_allreduce_process_group ddp_hook_parity_powerSGD ddp_ignore_params_arg ddp_join_model_equivalence
ddp_model_diff_num_params_across_ranks ddp_multiple_nested_unused_params_error ddp_new_tensor_in_fwd_static_graph
ddp_returns_tensor_with_no_grad ddp_uneven_input_join_disable ddp_unused_params_rebuild_buckets_exception
detect_ddp_is_actually_static periodic_model_averager sparse_all_reduce_sum_cuda static_graph_multi_forward
undefined_grad_parity_unused_parameters
""",
}
"""How torch's tests are run, and the names of their methods without "test_"."""

Case = tuple[Plan, str]
CASES = [(plan, f"test_{name}") for plan, names in TESTS.items() for name in names.split()]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[Case, Outcome]:
    """What became of the tests that were chosen; the plans are carried out at the same time, ranks wait mostly."""
    items = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params["case"] for item in items if isinstance(item, pytest.Function)]

    def carry_out(plan: Plan) -> list[tuple[Case, Outcome]]:
        names = [name for each, name in chosen if each == plan]
        made = run(plan._replace(names=names), LIMIT) if names else []
        return [((plan, outcome.test), outcome) for outcome in made]

    with ThreadPoolExecutor(len(TESTS)) as threads:
        return dict(pair for pairs in threads.map(carry_out, TESTS) for pair in pairs)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=[f"{name}-{plan}" for plan, name in CASES])
def test_it_passes(outcomes: dict[Case, Outcome], case: Case) -> None:
    plan, _ = case
    outcome = outcomes.get(case) or outcomes.get((plan, ""))
    assert outcome is not None, "it was not run"
    assert outcome.outcome == PASSED, outcome.reason
