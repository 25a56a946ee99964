//! Model tests of handing work over: every interleaving of a caller and a helper, up to a bound of
//! preemptions, and every value that memory orderings let a load see.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p kv-cpu --lib --release loom
//! ```
#![cfg(loom)]
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use super::pool::{Pool, Wake};
use super::spawn::SpawnWorkers;
use super::sync::atomic::{AtomicUsize, Ordering};
use super::sync::thread;
use super::workers::Workers;

/// Explores `body` with at most `preemptions` preemptions.
fn model(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}

fn pool() -> Pool {
    Pool::new(1).unwrap()
}

/// Adds one without any ordering, so that the caller's view is due to the job alone.
fn add(count: &AtomicUsize) {
    let value = count.load(Ordering::Relaxed);
    count.store(value + 1, Ordering::Relaxed);
}

/// Claims items of `next` until two are claimed, and counts each where it ran.
fn claim(next: &AtomicUsize, ran: &[AtomicUsize; 2]) {
    while let Some(item) = ran.get(next.fetch_add(1, Ordering::Relaxed)) {
        add(item);
    }
}

/// Runs two items, and checks that the caller sees each as run once.
fn run_items(pool: &Pool) {
    let (next, ran) = (AtomicUsize::new(0), [0, 0].map(AtomicUsize::new));
    let work = || claim(&next, &ran);
    pool.run(1, Wake::Anywhere, work, &work);
    assert_eq!(ran.map(|n| n.load(Ordering::Relaxed)), [1, 1]);
}

/// The caller's part ends only after the worker has begun, parked or spinning: a lost wake-up
/// leaves the caller waiting for ever, which loom reports.
#[test]
fn loom_every_job_reaches_the_worker() {
    model(3, || {
        let pool = pool();
        for _ in 0..2 {
            let (came, written) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let wait = || {
                while came.load(Ordering::Relaxed) == 0 {
                    thread::yield_now();
                }
            };
            let help = || {
                came.store(1, Ordering::Relaxed);
                add(&written);
            };
            pool.run(1, Wake::Anywhere, wait, &help);
            assert_eq!(written.load(Ordering::Relaxed), 1);
        }
    });
}

/// The caller sees all work done when a run returns, whether or not the worker began in time.
#[test]
fn loom_completion_is_seen_by_the_caller() {
    model(3, || {
        let pool = pool();
        run_items(&pool);
        run_items(&pool);
    });
}

/// A worker that begins late runs nothing of a job that has returned.
#[test]
fn loom_no_helper_enters_a_closed_job() {
    model(3, || {
        let ran = Arc::new(AtomicUsize::new(0));
        let pool = pool();
        let help = || add(&ran);
        pool.run(1, Wake::Anywhere, || (), &help);
        let at_return = ran.load(Ordering::Relaxed);
        drop(pool);
        assert_eq!(ran.load(Ordering::Relaxed), at_return);
    });
}

/// Dropping a pool ends its worker in any state: loom reports a worker that is left.
#[test]
fn loom_drop_ends_the_worker() {
    model(3, || drop(pool()));
    model(3, || {
        let pool = pool();
        pool.run(1, Wake::Anywhere, || (), &|| ());
        drop(pool);
    });
}

/// A panic of the helper reaches the caller; the worker survives it.
#[test]
fn loom_a_panic_reaches_the_caller() {
    model(2, || {
        let pool = pool();
        let came = AtomicUsize::new(0);
        let help = || {
            came.store(1, Ordering::Relaxed);
            resume_unwind(Box::new("in a helper"));
        };
        let run = || pool.run(1, Wake::Anywhere, || (), &help);
        let result = catch_unwind(AssertUnwindSafe(run));
        assert_eq!(result.is_err(), came.load(Ordering::Relaxed) == 1);
        run_items(&pool);
    });
}

/// A panic of the caller's own part still waits for the helper.
#[test]
fn loom_a_panicking_caller_waits_for_its_helper() {
    model(3, || {
        let pool = pool();
        let (begun, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let help = || {
            add(&begun);
            add(&ended);
        };
        let own = || resume_unwind(Box::new("in the caller"));
        let run = || pool.run(1, Wake::Anywhere, own, &help);
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        assert_eq!(begun.load(Ordering::Relaxed), ended.load(Ordering::Relaxed));
    });
}

/// Two callers share one worker: each sees its own work done.
#[test]
fn loom_callers_share_a_worker() {
    model(1, || {
        let pool = Arc::new(pool());
        let other = Arc::clone(&pool);
        let other = thread::spawn(move || run_items(&other));
        run_items(&pool);
        other.join().unwrap();
    });
}

/// Closures on an executor that starts them at any time make no call twice and leave none out.
#[test]
fn loom_spawned_closures_help() {
    model(2, || {
        let workers = SpawnWorkers::new(2, |help| drop(thread::spawn(help)));
        for _ in 0..2 {
            let ran = [0, 0].map(AtomicUsize::new);
            workers.run(2, &|worker| add(&ran[worker]));
            assert_eq!(ran.map(|n| n.load(Ordering::Relaxed)), [1, 1]);
        }
    });
}
