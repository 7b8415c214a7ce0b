"""Every Triton kernel, compiled ahead of time for GPUs that need not be here, and what the machine code then tells.

What is checked are the facts that `make facts` has written down (tests/support/facts.py).
"""

from __future__ import annotations

import pytest
from aot_cases import SHARED_LIMIT
from compiled_kernels import TABLE, all_kernels, table
from facts import kept
from machine_code import copies_before_reads_end, single_buffers


@pytest.fixture(scope="module")
def compiled():
    """By case: its kernel, what its loads and products must be, and `facts` by architecture."""
    return kept("triton")


def test_every_kernel_is_compiled(compiled):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert all_kernels() == {case["kernel"] for case in compiled.values()}
    for name, case in compiled.items():
        assert case["facts"] and set(case["facts"]) <= set(map(str, SHARED_LIMIT)), name


def test_registers_and_shared_memory_suffice(compiled):
    for name, case in compiled.items():
        for capability, facts in case["facts"].items():
            assert facts["stack"] == facts["local"] == 0, f"{name} spills registers: {facts}"
            limit = SHARED_LIMIT[int(capability)]
            assert facts["shared"] <= limit, f"{name} sm_{capability}: {facts['shared']} bytes of shared memory"


def test_loads_are_16_bytes_wide(compiled):
    for name, case in compiled.items():
        for capability, facts in case["facts"].items():
            loads, where = facts["loads"], f"{name} sm_{capability}"  # how many there are of each kind
            wide = sum(count for load, count in loads.items() if ".128" in load)
            assert wide >= case["wide_loads"], f"{where}: {loads}"
            narrow = sum(count for load, count in loads.items() if ".U16" in load or ".U8" in load)
            assert narrow <= case["narrow_loads"], f"{where}: {loads}"


def test_what_all_threads_want_is_loaded_once(compiled):
    """The numbers of a query in attention's backward: not again by each thread, four bytes at a time."""
    for name, case in compiled.items():
        for capability, facts in case["facts"].items():
            if name.startswith("attention_"):
                small = facts["loads"].get("LDGSTS.E", 0)
                assert small <= 8, f"{name} sm_{capability}: {small} asynchronous copies of 4 bytes"


def test_products_run_on_the_tensor_cores(compiled):
    """wgmma on Hopper, the fifth generation's instruction on Blackwell, mma on Ampere: SASS's own names."""
    for name, case in compiled.items():
        for capability, instruction in (("80", "HMMA"), ("90", "HGMMA"), ("100", "UTCHMMA")):
            facts = case["facts"].get(capability)
            if case["has_products"] and facts is not None:
                assert instruction in facts["products"], f"{name} sm_{capability}: {facts['products']}"


def test_products_of_a_warpgroup_do_not_wait_for_each_other(compiled):
    """ptxas says where it had to serialise wgmma; tests/gpu/test_gpu_tune.py provokes it."""
    for name, case in compiled.items():
        for capability, facts in case["facts"].items():
            assert facts["serialised"] == [], f"{name} sm_{capability}: {facts['serialised']}"


def test_fp32_attention_has_no_tensor_cores(compiled):
    """Its gradients want delta, a product of a block of its own, in the bits of dout v^T (attention_bwd.py)."""
    names = [name for name in compiled if name.startswith("attention_") and "-fp32" in name]
    assert any("records" in name for name in names) and any("_dq_" in name for name in names)
    for name in names:
        for capability, facts in compiled[name]["facts"].items():
            assert set(facts["products"]) <= {"FFMA"}, f"{name} sm_{capability}: {facts['products']}"


def test_copies_wait_for_the_readers_of_what_they_overwrite(compiled):
    records = "attention_bwd._attention_dkdv_kernel-bf16-plain-64-tile128-sm_90"
    assert compiled[records]["facts"]["90"]["single"]["count"] > 0  # as load_records says
    for name, case in compiled.items():
        for capability, facts in case["facts"].items():
            where, single = f"{name} sm_{capability}", facts["single"]
            assert facts["early_copies"] == [], f"{where}: {facts['early_copies']}"
            assert single["read_later"] == [], f"{where}: {single['read_later']}"
            assert set(single["waits"]) <= {"0"}, f"{where}: a wait leaves {single['waits']} copies under way"


def test_copies_that_do_not_wait_are_found():
    make = "%{} = getelementptr i8, ptr addrspace(3) getelementptr (i8, ptr addrspace(3) @global_smem, i32 {}), i32 %9"
    made = [make.format("a", 256), make.format("b", 256), make.format("c", 512)]
    copy = 'call void asm sideeffect "cp.async.ca.shared.global [ $0 + 0 ]", "r"(ptr addrspace(3) %a)'
    wait = "call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)"
    reads = {name: f"%1 = load float, ptr addrspace(3) %{name}, align 4" for name in "bc"}

    def found(*body):
        return copies_before_reads_end("\n".join([*made, "5:", *body, "br i1 %7, label %5, label %6", "6:"]))

    assert found(wait, reads["b"], wait, copy) == found(wait, reads["c"], copy) == found(wait, copy, reads["b"]) == []
    assert found(wait, reads["b"], copy) == [copy, copy]
    assert found(copy, wait, reads["b"]) == [copy]  # the next iteration's
    body = ["common.ret:", "ret void", copy, reads["b"], "br label %common.ret"]  # the return, written down first
    assert copies_before_reads_end("\n".join([*made, *body])) == []


def test_products_that_read_one_buffer_later_are_found():
    alloc, view = "%a = ttg.local_alloc : () -> !ttg.memdesc<{}x64x4xf32", "%b = ttg.memdesc_index %a[%c]"
    product, wait = "%e = ttng.warp_group_dot %b, %d", "%f:2 = ttng.warp_group_dot_wait %e, %b {{pendings = {} : i32}}"

    def found(*body):
        return single_buffers("\n".join(body))

    late = {"count": 1, "read_later": [product], "waits": []}
    assert found(alloc.format(1), view, product) == found(alloc.format(1), view, product, wait.format(1)) == late
    assert found(alloc.format(1), view, product, "%g = arith.addf %h, %i", wait.format(0)) == late
    assert found(alloc.format(1), view, product, wait.format(0)) == {**late, "read_later": []}
    # Another loop's buffer of the same name
    assert found(alloc.format(1), view, alloc.format(2), view, product) == {**late, "read_later": []}
    assert found(alloc.format(1), "ttg.async_wait %b {num = 2 : i32}")["waits"] == ["2"]


def test_the_table_shows_what_is_kept(compiled):
    assert TABLE.read_text(encoding="utf-8") == table(compiled), "run `make facts`"
