//! Planes that are cut into several buffers, and plans that are run without a cache.
use kv_core::backend::{
    AnyBackend, AnyBuffer, AnyQueue, Backend, KvStorage, Plane, PlaneLayout, PlaneShape, PlaneView,
    Queue,
};
use kv_core::block::BlockTables;
use kv_core::plan::{
    AttendArgs, BatchEntry, BlockCopy, CopyArgs, CopyPlan, Determinism, GatherArgs, GatherPlan,
    GatherRange, PlanBuffers, WriteArgs,
};
use kv_core::{Axes, BlockId, BlockOrder, DType, KvFormat};

use super::{ORDERS, case, small};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::{Place, Staged, dim, limited_erased};
use crate::fixture::{
    CacheFixture, StepConfig, StepKind, check_attention, check_rows, dense, options,
};
use crate::oracle::Attention;
use crate::rng::Rng;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("segments/cache_with_small_bindings", small_bindings),
        case("segments/a_block_too_large_is_refused", too_large),
        case("segments/plans_driven_by_hand", by_hand),
        case("segments/block_copies_by_hand", copies),
    ]
}

fn small_bindings(backend: &AnyBackend) -> CaseResult {
    for blocks in [1, 2, 3, 5] {
        for order in ORDERS {
            let spec = small().head_dims(8, 4).block_order(order).paged(4, 16).build()?;
            let block = spec.groups()[0].layouts()[0].block_bytes();
            let limit = block * blocks + block / 2;
            let device = limited_erased(backend, |c| c.with_binding_bytes_max(limit));
            let mut fixture = CacheFixture::new(&device, spec, 1)?;
            let segments = fixture
                .cache
                .storage(kv_core::GroupId(0))
                .and_then(|storage| Some(storage.plane(0, Plane::Key)?.num_segments() as u64));
            ensure(segments == Some(16_u64.div_ceil(blocks)), || {
                format!("{blocks} blocks a segment: {segments:?} segments")
            })?;
            fixture.fill(1, 30)?;
            fixture.fill(2, 7)?;
            fixture.fork(1, 3)?;
            let inputs =
                [(1, StepKind::Tokens(1)), (3, StepKind::Tokens(2)), (2, StepKind::Tokens(9))];
            fixture
                .step(&inputs, &StepConfig::default())
                .at(format!("{blocks} blocks a segment"))?;
            fixture.check()?;
        }
    }
    Ok(Outcome::Holds)
}

fn too_large(backend: &AnyBackend) -> CaseResult {
    let device = limited_erased(backend, |capabilities| capabilities.with_binding_bytes_max(100));
    let made = kv_core::KvCache::new(device, small().build()?);
    crate::case::refused("a block of 256 bytes on a device that binds 100", made, |error| {
        matches!(error, kv_core::CacheError::Device(e)
            if e.kind() == kv_core::error::DeviceErrorKind::Unsupported)
    })?;
    Ok(Outcome::Holds)
}

fn layout(order: BlockOrder, format: KvFormat, head_dim: u32) -> Result<PlaneLayout, CaseError> {
    let shape =
        PlaneShape { num_blocks: 7, block_size: 4, num_kv_heads: 2, head_dim, order, format };
    Ok(PlaneLayout::new(shape)?)
}

/// Allocates the buffers of one plane, full of bytes that are NaN in every format.
fn buffers(
    backend: &AnyBackend,
    queue: &mut AnyQueue,
    layout: &PlaneLayout,
) -> Result<Vec<AnyBuffer>, CaseError> {
    let mut made = Vec::new();
    for segment in 0..layout.num_segments() {
        let bytes = layout.segment_bytes(segment);
        let buffer = backend.alloc(bytes)?;
        queue.upload(&buffer, 0, &vec![0xFF; bytes as usize])?;
        made.push(buffer);
    }
    Ok(made)
}

/// Makes tables of two sequences over scattered blocks: 11 and 6 tokens.
fn scattered() -> Result<BlockTables, CaseError> {
    let mut tables = BlockTables::new(7, 2);
    tables.ensure_rows(3);
    for (row, block) in [(0, 5), (2, 6), (0, 0), (2, 3), (0, 4)] {
        tables.push(row, BlockId(block))?;
    }
    Ok(tables)
}

fn by_hand(backend: &AnyBackend) -> CaseResult {
    for order in ORDERS {
        for format in KvFormat::PLAIN {
            for per_segment in [1, 2, 3, 7] {
                let layouts =
                    [layout(order, *format, 8)?, layout(order, *format, dim(backend, 6))?];
                let layouts = layouts.map(|layout| layout.with_segments_of(per_segment));
                drive(backend, &layouts)
                    .at(format!("{order:?}, {format}, {per_segment} blocks a segment"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Writes 11 and 6 tokens, attends with the last 2 and 6 of them, and reads all rows back.
fn drive(backend: &AnyBackend, layouts: &[PlaneLayout; 2]) -> Result<(), CaseError> {
    let mut queue = backend.queue()?;
    let tables = scattered()?;
    let memory =
        [buffers(backend, &mut queue, &layouts[0])?, buffers(backend, &mut queue, &layouts[1])?];
    let planes = [PlaneView::new(layouts[0], &memory[0])?, PlaneView::new(layouts[1], &memory[1])?];
    let mut rng = Rng::new(9);
    let element = layouts[0].format().element().unwrap_or(DType::F32);
    let mut random = |n: usize| -> Vec<f32> {
        let values = rng.normals(n).into_iter();
        values.map(|x| crate::oracle::round::round_f32(element, x)).collect()
    };
    let [dk, dv] = layouts.each_ref().map(|layout| layout.head_dim() as usize);
    let cached = [11, 6].map(|n| [random(n * 2 * dk), random(n * 2 * dv)]);
    let q = [random(2 * 4 * dk), random(6 * 4 * dk)];
    let mut stage = |lens: &[usize], heads_dim, rows: Vec<Vec<f32>>| {
        let layout = dense(Axes::Thd, lens, heads_dim);
        let tensor = layout.pack(DType::F32, &rows, f32::NAN);
        Staged::new(backend, &mut queue, (layout, tensor), Place::Device)
    };
    let k = stage(&[11, 6], [2, dk], cached.iter().map(|kv| kv[0].clone()).collect())?;
    let v = stage(&[11, 6], [2, dv], cached.iter().map(|kv| kv[1].clone()).collect())?;
    let queries = stage(&[2, 6], [4, dk], q.to_vec())?;
    let out = dense(Axes::Thd, &[2, 6], [4, dv]);
    let mut out = Staged::output(backend, &mut queue, (out, DType::F32), Place::Device)?;
    let entry = |row, new_tokens, queries| BatchEntry { row, cached: 0, new_tokens, queries };
    let batch = [entry(0, 11, 2), entry(2, 6, 6)];
    let mut buffers = PlanBuffers::default();
    let (write, attend) = buffers.plan(&layouts[0], &tables, &batch, 4, Determinism::Fast)?;
    let args = WriteArgs::new(&write, k.view(), v.view(), Axes::Thd, planes[0], planes[1])?;
    queue.write_kv(&write, args)?;
    let oracle = Attention::causal(4, 2, dk, dv);
    let chosen = options(&oracle, Axes::Thd);
    let args = AttendArgs::new(&attend, queries.view(), out.view_mut(), None, planes, chosen)?;
    queue.attend(&attend, args)?;
    let tensor = out.read(backend.capabilities(), &mut queue)?;
    let got = out_rows(tensor, &[2, 6], [4, dv])?;
    check_attention(&oracle, &q, &cached, (&got, None), DType::F32)?;
    for (index, plane) in planes.into_iter().enumerate() {
        let expected = cached.each_ref().map(|kv| kv[index].as_slice());
        read_back(backend, &mut queue, &tables, plane, expected)?;
    }
    Ok(())
}

fn out_rows(
    tensor: &crate::tokens::Tensor,
    lens: &[usize],
    heads_dim: [usize; 2],
) -> Result<Vec<Vec<f32>>, String> {
    dense(Axes::Thd, lens, heads_dim).unpack("out", tensor, lens, 0.0)
}

fn read_back(
    backend: &AnyBackend,
    queue: &mut AnyQueue,
    tables: &BlockTables,
    plane: PlaneView<'_, AnyBuffer>,
    expected: [&[f32]; 2],
) -> Result<(), CaseError> {
    let layout = *plane.layout();
    let dim = layout.head_dim() as usize;
    let range = |row, len| GatherRange { row, begin: 0, len };
    let ranges = [range(0, 11), range(2, 6)];
    let plan = GatherPlan::new(&layout, tables, &ranges)?;
    let dense = dense(Axes::Thd, &[11, 6], [2, dim]);
    let mut out = Staged::output(backend, queue, (dense, DType::F32), Place::Device)?;
    queue.gather(&plan, GatherArgs::new(&plan, plane, out.view_mut(), Axes::Thd)?)?;
    let rows = out_rows(out.read(backend.capabilities(), queue)?, &[11, 6], [2, dim])?;
    for (got, expected) in rows.iter().zip(expected) {
        check_rows(got, expected, 2 * dim)?;
    }
    Ok(())
}

/// Several copies at once, whole and partial, over every layer of a group.
fn copies(backend: &AnyBackend) -> CaseResult {
    for order in ORDERS {
        let dim_v = dim(backend, 6);
        let layouts = [layout(order, KvFormat::F16, 8)?, layout(order, KvFormat::F32, dim_v)?];
        let mut storage = KvStorage::new(backend, layouts)?;
        let mut queue = backend.queue()?;
        for layer in [0, 2] {
            storage.allocate(backend, layer)?;
        }
        let copy = |from, to, slots| BlockCopy { from: BlockId(from), to: BlockId(to), slots };
        let list = [copy(0, 1, 4), copy(2, 3, 1), copy(2, 6, 3), copy(5, 4, 0)];
        let mut expected = Vec::new();
        for (seed, plane) in (0..).zip(storage.view().planes()) {
            let bytes = plane.layout().plane_bytes();
            let mut rng = Rng::new(seed);
            let before: Vec<u8> = (0..bytes).map(|_| rng.bits() as u8).collect();
            let buffer = plane.segment(0).ok_or("a plane without a buffer")?;
            queue.upload(buffer, 0, &before)?;
            expected.push(before);
        }
        let plan = CopyPlan::new(&layouts[0], &list)?;
        queue.copy_blocks(&plan, CopyArgs::new(&plan, storage.view())?)?;
        for (before, plane) in expected.into_iter().zip(storage.view().planes()) {
            let buffer = plane.segment(0).ok_or("a plane without a buffer")?;
            let range = (0, plane.layout().plane_bytes());
            let got = crate::device::fetch(backend.capabilities(), &mut queue, buffer, range)?;
            check_copied(&before, &got, &list, plane.layout()).at(format!("{order:?}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// Checks that copied tokens equal the source's and that other blocks are unchanged; slots after a
/// partial copy may hold anything.
fn check_copied(
    before: &[u8],
    after: &[u8],
    list: &[BlockCopy],
    layout: &PlaneLayout,
) -> Result<(), CaseError> {
    let row = layout.row_bytes() as usize;
    let at = |block: u32, token: u32, head: u32| {
        let inside =
            u64::from(token) * layout.token_stride() + u64::from(head) * layout.head_stride();
        (u64::from(block) * layout.block_bytes() + inside) as usize
    };
    for block in 0..layout.num_blocks() {
        let copy = list.iter().find(|copy| copy.to.0 == block);
        let (source, tokens) = copy.map_or((block, 4), |copy| (copy.from.0, copy.slots));
        for token in 0..tokens {
            for head in 0..layout.num_kv_heads() {
                let want = &before[at(source, token, head)..][..row];
                let got = &after[at(block, token, head)..][..row];
                ensure(got == want, || {
                    format!("block {block}, token {token}, head {head}: {got:?}, expected {want:?}")
                })?;
            }
        }
    }
    Ok(())
}
