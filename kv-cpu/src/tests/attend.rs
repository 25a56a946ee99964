//! Attention: shapes, types and options against the reference, and results equal to the bit.
use kv_core::plan::{BatchEntry, Determinism};
use kv_core::{Axes, BlockOrder, DType, KvFormat};
use kv_cpu_kernels::{Kernels, PrefetchTarget};

use super::fixture::{Case, Choice, Fixture};
use super::{DTYPES, FORMATS, Random, backends};
use crate::{CpuBackend, CpuOptions, Isa};

pub(super) fn entry(row: u32, cached: u32, new_tokens: u32, queries: u32) -> BatchEntry {
    BatchEntry { row, cached, new_tokens, queries }
}

pub(super) fn case(batch: Vec<BatchEntry>) -> Case {
    Case {
        seed: 1,
        batch,
        kv_heads: 2,
        group: 2,
        dims: [16, 16],
        block_size: 4,
        order: BlockOrder::Hnd,
        formats: [KvFormat::F32; 2],
        transforms: [false; 2],
        full_precision_prefix: 0,
        broken: Vec::new(),
        dtype: DType::F32,
        qkv: Axes::Thd,
        padding: [0, 0],
        blocks_per_segment: 1000,
        workers: 1,
        determinism: Determinism::Fast,
    }
}

pub(super) fn random_case(random: &mut Random) -> Case {
    let batch = (0..=random.below(4))
        .map(|row| {
            let new_tokens = random.pick(&[0, 1, 1, 3, 9, 20, 70]);
            let queries = match random.below(5) {
                0 => random.below(4),
                1 => new_tokens + 3,
                _ => new_tokens,
            };
            entry(row, random.below(90), new_tokens, queries)
        })
        .collect();
    Case {
        seed: random.bits(),
        batch,
        kv_heads: random.pick(&[1, 2, 3]),
        group: random.pick(&[1, 2, 3, 4, 5, 8, 11]),
        dims: [0, 1].map(|_| random.pick(&[8, 16, 40, 48, 64, 80, 96, 3, 17])),
        block_size: random.pick(&[1, 3, 4, 16, 256]),
        order: random.pick(&[BlockOrder::Nhd, BlockOrder::Hnd]),
        formats: [0, 1].map(|_| random.format()),
        transforms: [0, 1].map(|_| random.below(2) == 0),
        full_precision_prefix: random.pick(&[0, 0, 1, 4, 40]),
        broken: Vec::new(),
        dtype: random.pick(&DTYPES),
        qkv: random.pick(&[Axes::Thd, Axes::Bshd, Axes::Sbhd]),
        padding: [random.below(3), random.below(3)],
        blocks_per_segment: random.pick(&[1, 2, 1000]),
        workers: random.pick(&[1, 8]),
        determinism: Determinism::Fast,
    }
}

pub(super) fn random_choice(random: &mut Random, case: &Case) -> Choice {
    let heads = case.kv_heads * case.group;
    Choice {
        full: random.below(3) == 0,
        window: (random.below(3) == 0).then(|| random.below(40)),
        sink_tokens: random.pick(&[0, 0, 1, 4, 33, 50]),
        cap: (random.below(4) == 0).then_some(1.5),
        sink_logits: (random.below(3) == 0).then(|| {
            let mut sink_logits: Vec<_> = (0..heads).map(|_| random.unit() * 3.0).collect();
            sink_logits[0] = f32::NEG_INFINITY;
            sink_logits
        }),
    }
}

#[test]
fn random_batches_match_the_reference() {
    let mut random = Random::new(7);
    for _ in 0..150 {
        let case = random_case(&mut random);
        let choice = random_choice(&mut random, &case);
        for (name, backend) in backends() {
            Fixture::new(&backend, case.clone()).attend(&name, &backend, &choice);
        }
    }
}

#[test]
fn large_heads_match_the_reference() {
    for dims in [[128, 128], [192, 128], [256, 256], [96, 192]] {
        for format in FORMATS {
            let case = Case {
                dims,
                formats: [format; 2],
                group: 4,
                block_size: 16,
                dtype: DType::Bf16,
                ..case(vec![entry(0, 150, 1, 1), entry(1, 10, 70, 70)])
            };
            for (name, backend) in backends() {
                Fixture::new(&backend, case.clone()).attend(&name, &backend, &Choice::default());
            }
        }
    }
}

/// Some numbers of heads have register tiles of their own, others are padded with rows of zeros.
#[test]
fn any_number_of_heads_matches_the_reference() {
    let mut formats = FORMATS.to_vec();
    formats.extend(["int8", "fp8-e4m3", "fp8-e5m2"].map(|name| name.parse::<KvFormat>().unwrap()));
    for (group, format) in (1..=9).flat_map(|group| formats.iter().map(move |f| (group, *f))) {
        let case = Case {
            dims: [64, 96],
            formats: [format; 2],
            group,
            block_size: 16,
            full_precision_prefix: if group % 2 == 0 { 3 } else { 0 },
            dtype: if group % 3 == 0 { DType::F32 } else { DType::Bf16 },
            ..case(vec![entry(0, 70, 1, 1), entry(1, 5, 1, 1)])
        };
        for (name, backend) in backends() {
            Fixture::new(&backend, case.clone()).attend(&name, &backend, &Choice::default());
        }
    }
}

#[test]
fn a_cut_context_matches_the_reference() {
    for (queries, window) in [(1, None), (3, None), (2, Some(700)), (1, Some(3))] {
        let case = Case {
            workers: 8,
            block_size: 16,
            ..case(vec![entry(0, 2500, queries, queries), entry(1, 5, 1, 1)])
        };
        let sink_logits = Some(vec![0.5, -1.0, 2.0, f32::NEG_INFINITY]);
        for sink_logits in [None, sink_logits] {
            let choice = Choice { window, sink_logits, ..Choice::default() };
            for (name, backend) in backends() {
                let fixture = Fixture::new(&backend, case.clone());
                fixture.attend(&name, &backend, &choice);
            }
        }
    }
}

/// More heads in a group than a work item has rows.
#[test]
fn one_kv_head_may_serve_very_many() {
    let case = Case {
        kv_heads: 1,
        group: 128,
        formats: [KvFormat::Bf16; 2],
        ..case(vec![entry(0, 70, 3, 3)])
    };
    for (name, backend) in backends() {
        Fixture::new(&backend, case.clone()).attend(&name, &backend, &Choice::default());
    }
}

#[test]
fn bits_depend_neither_on_repetition_nor_on_threads() {
    let case = Case {
        workers: 8,
        formats: [KvFormat::F16; 2],
        group: 3,
        ..case(vec![entry(0, 1500, 1, 1), entry(1, 0, 100, 100)])
    };
    let choice = Choice::default();
    let run = |threads| {
        let options = CpuOptions::default().with_isa(Isa::detect()).with_threads(threads);
        let backend = CpuBackend::open(options).unwrap();
        let fixture = Fixture::new(&backend, case.clone());
        fixture
            .attend("threads", &backend, &choice)
            .map(|values| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
    };
    let first = run(1);
    for threads in [1, 2, 3, 7] {
        assert!(run(threads) == first, "{threads} threads");
    }
}

#[test]
fn bits_do_not_depend_on_prefetches() {
    let all = [1, 2, 4].into_iter().flat_map(|group| FORMATS.map(|f| (group, f)));
    for ((group, format), dim) in all.flat_map(|all| [64, 128].map(|dim| (all, dim))) {
        let case = Case {
            dims: [dim, dim],
            formats: [format; 2],
            group,
            block_size: 16,
            dtype: DType::Bf16,
            ..case(vec![entry(0, 70, 1, 1), entry(1, 5, 1, 1)])
        };
        for isa in Isa::available() {
            let run = |target| {
                let kernels = Kernels::new(isa, target).unwrap();
                let backend =
                    CpuBackend::open(CpuOptions::default().with_isa(isa).with_threads(1)).unwrap();
                let backend = backend.with_kernels(kernels);
                let fixture = Fixture::new(&backend, case.clone());
                fixture.attend("prefetch", &backend, &Choice::default())
            };
            let first = run(PrefetchTarget::None);
            for target in [PrefetchTarget::L2, PrefetchTarget::L2Twice] {
                assert!(run(target) == first, "{isa} {group} {format} {dim}: {target:?}");
            }
        }
    }
}

/// A query's row has the same bits whatever the number of queries, where the context is not split.
/// On AMX, few rows run on another strategy than many, so only large numbers are compared; a single
/// query runs on the direct strategy and has other bits.
#[test]
fn bits_do_not_depend_on_the_other_queries() {
    for group in [1, 3, 4] {
        for (name, backend) in backends() {
            let case = Case {
                group,
                formats: [KvFormat::Bf16; 2],
                dims: [24, 40],
                ..case(vec![entry(0, 0, 90, 90)])
            };
            let mut fixture = Fixture::new(&backend, case);
            let [many, _] = fixture.attend(&name, &backend, &Choice::default());
            let mut last = |queries| {
                fixture.case.batch[0].queries = queries;
                fixture.attend(&name, &backend, &Choice::default())[0].clone()
            };
            let [two, few, some] = [2, 5, 34].map(&mut last);
            assert!(many.ends_with(&some), "{name} {group}: 34 queries");
            if !(name.contains("amx") || name.contains("matrices")) {
                assert!(many.ends_with(&few), "{name} {group}: 5 queries");
                assert!(many.ends_with(&two), "{name} {group}: 2 queries");
            }
        }
    }
}

/// The same for other sequences of the batch, with `Determinism::BatchInvariant`.
#[test]
fn bits_do_not_depend_on_the_other_sequences() {
    for (queries, group) in [(1, 1), (1, 5), (1, 12), (7, 2)] {
        for (name, backend) in backends() {
            let case = Case {
                group,
                formats: [KvFormat::Bf16, KvFormat::F16],
                dims: [40, 64],
                workers: 8,
                determinism: Determinism::BatchInvariant,
                ..case(vec![
                    entry(0, 700, queries, queries),
                    entry(1, 40, 1, 1),
                    entry(2, 5, 30, 30),
                ])
            };
            let mut fixture = Fixture::new(&backend, case);
            let [together, _] = fixture.attend(&name, &backend, &Choice::default());
            fixture.case.batch.truncate(1);
            let [alone, _] = fixture.attend(&name, &backend, &Choice::default());
            assert!(together.starts_with(&alone), "{name} {queries} {group}");
        }
    }
}

/// A value that is not finite reaches the queries that see it and no other, for any number of
/// queries.
#[test]
fn a_non_finite_row_reaches_the_queries_that_see_it() {
    let many = [(f32::NAN, 40, 70), (f32::INFINITY, 40, 70), (f32::NEG_INFINITY, 63, 70)];
    // Few enough to be columns of AMX blocks.
    let few = [(f32::NAN, 68, 4), (f32::INFINITY, 67, 4), (f32::NEG_INFINITY, 69, 5)];
    for (value, token, queries) in many.into_iter().chain(few) {
        for formats in [[KvFormat::Bf16; 2], [KvFormat::F16; 2]] {
            let broken = vec![(token, value)];
            let batch = vec![entry(0, 70 - queries, queries, queries)];
            let case = Case { formats, broken, ..case(batch) };
            for (name, backend) in backends() {
                let fixture = Fixture::new(&backend, case.clone());
                let [out, _] = fixture.attend(&name, &backend, &Choice::default());
                let of_token = 4 * 16;
                let first = 70 - usize::try_from(queries).unwrap();
                let (before, after) = out.split_at((token - first) * of_token);
                assert!(before.iter().all(|x| x.is_finite()), "{name} {value}");
                assert!(after.iter().any(|x| !x.is_finite()), "{name} {value}");
            }
        }
    }
}

#[test]
fn queries_without_keys_are_zero() {
    let batch = vec![entry(0, 0, 0, 3), entry(1, 0, 2, 5), entry(2, 0, 0, 0), entry(3, 6, 0, 0)];
    for sink_logits in [None, Some(vec![1.0, -2.0, 0.0, f32::NEG_INFINITY])] {
        for qkv in [Axes::Thd, Axes::Sbhd] {
            let case = Case { qkv, padding: [1, 2], ..case(batch.clone()) };
            let choice = Choice { sink_logits: sink_logits.clone(), ..Choice::default() };
            for (name, backend) in backends() {
                Fixture::new(&backend, case.clone()).attend(&name, &backend, &choice);
            }
        }
    }
}
