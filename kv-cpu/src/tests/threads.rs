//! Threads of the embedding program compute the same bits as the backend's own.
use std::sync::Arc;

use kv_core::KvFormat;
use kv_core::backend::Backend;
use kv_core::error::DeviceErrorKind;

use super::attend::{case, entry};
use super::fixture::{Case, Choice, Fixture};
use crate::{CpuBackend, CpuOptions, SpawnWorkers, Workers};

/// Makes all calls on the calling thread, the last worker's first.
struct InTurn(usize);

impl Workers for InTurn {
    fn count(&self) -> usize {
        self.0
    }
    fn run(&self, workers: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..workers).rev().for_each(task);
    }
}

/// Starts a thread for each call.
struct Scoped(usize);

impl Workers for Scoped {
    fn count(&self) -> usize {
        self.0
    }
    fn run(&self, workers: usize, task: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|scope| {
            (0..workers).for_each(|worker| _ = scope.spawn(move || task(worker)));
        });
    }
}

fn sources() -> Vec<(&'static str, Arc<dyn Workers>)> {
    let spawn = |help: Box<dyn FnOnce() + Send>| _ = std::thread::spawn(help);
    #[cfg_attr(not(feature = "rayon"), expect(unused_mut, reason = "rayon is one more"))]
    let mut sources: Vec<(_, Arc<dyn Workers>)> = vec![
        ("one worker", Arc::new(InTurn(1))),
        ("in turn", Arc::new(InTurn(5))),
        ("scoped", Arc::new(Scoped(3))),
        ("spawned", Arc::new(SpawnWorkers::new(3, spawn))),
    ];
    #[cfg(feature = "rayon")]
    {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        sources.push(("rayon", Arc::new(crate::RayonWorkers::new(Arc::new(pool)))));
        sources.push(("global rayon", Arc::new(crate::RayonWorkers::global())));
    }
    sources
}

#[test]
fn bits_do_not_depend_on_whose_threads_compute() {
    let decode = Case {
        workers: 8,
        formats: [KvFormat::F16; 2],
        group: 3,
        ..case(vec![entry(0, 1500, 1, 1), entry(1, 700, 1, 1)])
    };
    let prefill = Case { workers: 8, ..case(vec![entry(0, 0, 200, 200), entry(1, 300, 70, 70)]) };
    let choice = Choice::default();
    for (step, case) in [("decode", decode), ("prefill", prefill)] {
        let run = |options| {
            let backend = CpuBackend::open(options).unwrap();
            let fixture = Fixture::new(&backend, case.clone());
            fixture
                .attend(step, &backend, &choice)
                .map(|values| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        };
        let own = run(CpuOptions::default().with_threads(3));
        assert!(
            own == run(CpuOptions::default().with_threads(3).with_helper_affinity(true)),
            "{step}"
        );
        for (source, workers) in sources() {
            assert!(own == run(CpuOptions::default().with_workers(workers)), "{step}: {source}");
        }
    }
}

#[test]
fn impossible_workers_are_refused_in_words() {
    for (options, words) in [
        (CpuOptions::default().with_workers(Arc::new(InTurn(0))), "0 workers given, at least 1"),
        (
            CpuOptions::default().with_workers(Arc::new(InTurn(4097))),
            "4097 workers given, at most 4096",
        ),
        (
            CpuOptions::default().with_workers(Arc::new(InTurn(2))).with_threads(2),
            "workers and 2 threads given, only one of both may be",
        ),
    ] {
        assert!(format!("{options:?}").contains("workers: Some("), "{options:?}");
        let refused = CpuBackend::open(options).unwrap_err();
        assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
        assert!(refused.to_string().contains(words), "{refused}");
    }
    let backend =
        CpuBackend::open(CpuOptions::default().with_workers(Arc::new(InTurn(5)))).unwrap();
    assert_eq!(backend.capabilities().workers, 5);
}

/// Leaves out all workers but the first.
struct Skips;

impl Workers for Skips {
    fn count(&self) -> usize {
        3
    }
    fn run(&self, _: usize, task: &(dyn Fn(usize) + Sync)) {
        task(0);
    }
}

#[test]
#[should_panic(expected = "Workers::run returned without a call of worker 1 of 3")]
fn an_operation_on_workers_that_break_their_contract_panics() {
    let backend = CpuBackend::open(CpuOptions::default().with_workers(Arc::new(Skips))).unwrap();
    let case = Case { workers: 8, ..case(vec![entry(0, 0, 200, 200)]) };
    Fixture::new(&backend, case).attend("skips", &backend, &Choice::default());
}
