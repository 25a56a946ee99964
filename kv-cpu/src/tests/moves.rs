//! Copies, gathers, conversions and plain transfers.
use kv_core::backend::{
    Backend, Fence, KvStorage, Plane, PlaneLayout, PlaneShape, Queue, Readback,
};
use kv_core::plan::{
    BatchEntry, BlockCopy, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan, Determinism, GatherArgs,
    GatherPlan, GatherRange,
};
use kv_core::{Axes, BlockId, BlockOrder, KvFormat, TensorView, TensorViewMut};

use super::fixture::{Case, Fixture, Rows, from_bytes, round, to_bytes};
use super::{DTYPES, Random, backends};

const QKV: [Axes; 3] = [Axes::Thd, Axes::Bshd, Axes::Sbhd];

#[test]
fn transfers_keep_to_their_range() {
    for (name, backend) in backends() {
        let mut queue = backend.queue().unwrap();
        let buffer = backend.alloc(100).unwrap();
        queue.upload(&buffer, 10, &[1; 20]).unwrap();
        queue.zero(&buffer, 15, 5).unwrap();
        let fence = queue.submit().unwrap();
        queue.wait_for(&fence).unwrap();
        fence.wait().unwrap();
        let bytes = queue.download(&buffer, 9, 22).unwrap().wait().unwrap();
        let expected = [vec![0], vec![1; 5], vec![0; 5], vec![1; 10], vec![0]].concat();
        assert_eq!(bytes, expected, "{name}");
    }
}

fn random_case(random: &mut Random) -> Case {
    let lens = [random.below(40), 1 + random.below(700), 0];
    Case {
        seed: random.bits(),
        batch: lens
            .iter()
            .zip(0..)
            .map(|(&cached, row)| BatchEntry { row, cached, new_tokens: 0, queries: 0 })
            .collect(),
        kv_heads: random.pick(&[1, 3]),
        group: 1,
        dims: [random.pick(&[8, 17, 40]), random.pick(&[8, 17, 40])],
        block_size: random.pick(&[1, 4, 16, 1024]),
        order: random.pick(&[BlockOrder::Nhd, BlockOrder::Hnd]),
        formats: [0, 1].map(|_| random.format()),
        transforms: [0, 1].map(|_| random.below(2) == 0),
        full_precision_prefix: random.pick(&[0, 0, 1, 4, 40]),
        broken: Vec::new(),
        dtype: random.pick(&DTYPES),
        qkv: random.pick(&QKV),
        padding: [1, 2],
        blocks_per_segment: random.pick(&[1, 3, 1000]),
        workers: 1,
        determinism: Determinism::Fast,
    }
}

#[test]
fn gather_reads_back_what_was_written() {
    let mut random = Random::new(11);
    for _ in 0..40 {
        let case = random_case(&mut random);
        let to = random.pick(&DTYPES);
        for (name, backend) in backends() {
            let fixture = Fixture::new(&backend, case.clone());
            let all = fixture.case.batch[1].cached;
            let begin = all / 3;
            let ranges = [
                GatherRange { row: 1, begin, len: all - begin },
                GatherRange { row: 2, begin: 0, len: 0 },
                GatherRange { row: 0, begin: 0, len: case.batch[0].cached },
            ];
            let plan = GatherPlan::new(&fixture.layouts[0], &fixture.tables, &ranges).unwrap();
            for which in [0, 1] {
                let (heads, dim) = (case.kv_heads, case.dims[which]);
                let lens = ranges.map(|range| range.len);
                let rows = Rows::new((case.qkv, case.padding), &lens, heads, dim);
                let mut bytes = vec![0xff; rows.len() * to.size()];
                let out = TensorViewMut::host_bytes(to, &mut bytes, &rows.dims);
                let args = GatherArgs::new(&plan, fixture.plane(which), out, case.qkv).unwrap();
                backend.queue().unwrap().gather(&plan, args).unwrap();
                let mut expected = vec![0.0; rows.len()];
                let row = (heads * dim) as usize;
                let mut start = 0;
                for (entry, range) in ranges.iter().enumerate() {
                    for token in 0..range.len {
                        let position = (range.begin + token) as usize;
                        let from =
                            &fixture.content.values[which][range.row as usize][position * row..];
                        let to_row = &mut expected[rows.at(entry, start, token)..][..row];
                        for (out, x) in to_row.iter_mut().zip(from) {
                            *out = round(to, *x);
                        }
                    }
                    start += range.len;
                }
                assert_eq!(from_bytes(to, &bytes), expected, "{name} {case:?} {to}");
            }
        }
    }
}

#[test]
fn conversions_move_every_row_and_zero_the_rest() {
    let mut random = Random::new(12);
    for _ in 0..60 {
        let lens: Vec<_> = (0..=random.below(4)).map(|_| random.pick(&[0, 1, 5, 600])).collect();
        let (heads, dim) = (1 + random.below(3), random.pick(&[1, 8, 20]));
        let [(from, from_type), (to, to_type)] =
            [0, 1].map(|_| (random.pick(&QKV), random.pick(&DTYPES)));
        let plan = ConvertPlan::new(&lens).unwrap();
        let src_rows = Rows::new((from, [1, 1]), &lens, heads, dim);
        let dst_rows = Rows::new((to, [2, 3]), &lens, heads, dim);
        let mut src = vec![f32::NAN; src_rows.len()];
        let mut expected = vec![0.0; dst_rows.len()];
        for (entry, (start, len)) in plan.entries().enumerate() {
            for token in 0..len {
                for i in 0..(heads * dim) as usize {
                    let x = round(from_type, random.unit() * 100.0);
                    src[src_rows.at(entry, start, token) + i] = x;
                    expected[dst_rows.at(entry, start, token) + i] = round(to_type, x);
                }
            }
        }
        let src = to_bytes(from_type, &src);
        for (name, backend) in backends() {
            let mut dst = vec![0xff; dst_rows.len() * to_type.size()];
            let view = TensorView::host_bytes(from_type, &src, &src_rows.dims);
            let out = TensorViewMut::host_bytes(to_type, &mut dst, &dst_rows.dims);
            let args = ConvertArgs::new(&plan, (view, from), (out, to)).unwrap();
            backend.queue().unwrap().convert(&plan, args).unwrap();
            assert_eq!(from_bytes(to_type, &dst), expected, "{name} {from}->{to} {lens:?}");
        }
    }
}

#[test]
fn copies_touch_nothing_but_their_tokens() {
    for order in [BlockOrder::Nhd, BlockOrder::Hnd] {
        for (name, backend) in backends() {
            let layout = PlaneLayout::new(PlaneShape {
                num_blocks: 8,
                block_size: 4,
                num_kv_heads: 2,
                head_dim: 5,
                order,
                format: KvFormat::F16,
            });
            let layout = layout.unwrap();
            let mut storage = KvStorage::new(&backend, [layout, layout]).unwrap();
            storage.allocate(&backend, 0).unwrap();
            storage.allocate(&backend, 2).unwrap();
            let planes = || {
                [0, 2].into_iter().flat_map(|layer| {
                    [Plane::Key, Plane::Value].map(|which| storage.plane(layer, which).unwrap())
                })
            };
            for (index, plane) in planes().enumerate() {
                let mut random = Random::new(index as u64);
                let fill = |bytes: &mut [u8]| {
                    for byte in bytes {
                        *byte = random.bits() as u8;
                    }
                };
                plane.segment(0).unwrap().write(fill);
            }
            let before: Vec<_> =
                planes().map(|plane| plane.segment(0).unwrap().read(<[u8]>::to_vec)).collect();
            let copies = [(1, 6, 3), (0, 2, 4), (1, 3, 0)].map(|(from, to, tokens)| BlockCopy {
                from: BlockId(from),
                to: BlockId(to),
                slots: tokens,
            });
            let plan = CopyPlan::new(&layout, &copies).unwrap();
            let args = CopyArgs::new(&plan, storage.view()).unwrap();
            backend.queue().unwrap().copy_blocks(&plan, args).unwrap();
            for (plane, mut expected) in planes().zip(before) {
                let place = |block: u32, token: u32, head: u32| {
                    (u64::from(block) * layout.block_bytes()
                        + u64::from(token) * layout.token_stride()
                        + u64::from(head) * layout.head_stride()) as usize
                };
                for copy in copies {
                    for (token, head) in (0..copy.slots).flat_map(|t| [(t, 0), (t, 1)]) {
                        let from = place(copy.from.0, token, head);
                        let to = place(copy.to.0, token, head);
                        expected.copy_within(from..from + 10, to);
                    }
                }
                let after = plane.segment(0).unwrap().read(<[u8]>::to_vec);
                assert_eq!(after, expected, "{name} {order:?}");
            }
        }
    }
}
