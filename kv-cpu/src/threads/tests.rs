//! Work items on every source of threads, and workers that break their contract.
#![cfg(not(loom))]
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::AtomicBool;

use super::*;

/// Workers whose run is a function.
struct By<F>(usize, F);

impl<F: Fn(usize, &(dyn Fn(usize) + Sync)) + Send + Sync> Workers for By<F> {
    fn count(&self) -> usize {
        self.0
    }
    fn run(&self, workers: usize, task: &(dyn Fn(usize) + Sync)) {
        (self.1)(workers, task);
    }
}

fn given(
    count: usize,
    run: impl Fn(usize, &(dyn Fn(usize) + Sync)) + Send + Sync + 'static,
) -> Threads {
    Threads::given(Arc::new(By(count, run))).unwrap()
}

/// Starts a thread for each worker.
fn scoped(workers: usize, task: &(dyn Fn(usize) + Sync)) {
    std::thread::scope(|scope| {
        (0..workers).for_each(|worker| _ = scope.spawn(move || task(worker)));
    });
}

/// Runs 100 work items with `count` locals, and checks that each ran once.
fn run_items(threads: &Threads, count: usize) {
    let mut locals = vec![0_usize; count];
    let seen: Vec<_> = (0..100).map(|_| AtomicUsize::new(0)).collect();
    threads.run(seen.len(), true, &mut locals, |local, item| {
        *local += 1;
        seen[item].fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(locals.iter().sum::<usize>(), 100);
    assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
}

/// Returns the message of the panic of a run.
fn panic_of(threads: &Threads, work: impl Fn(usize) + Sync) -> String {
    let mut locals = vec![(); threads.count()];
    let run = || threads.run(100, true, &mut locals, |(), item| work(item));
    let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => (*panic.downcast_ref::<&str>().unwrap()).to_owned(),
    }
}

#[test]
fn each_item_runs_once() {
    for count in [1, 2, 5] {
        let spawn = |help: Box<dyn FnOnce() + Send>| _ = std::thread::spawn(help);
        let all = [
            Threads::new(Some(count), false).unwrap(),
            Threads::new(Some(count), true).unwrap(),
            given(count, scoped),
            given(count, |workers, task| (0..workers).rev().for_each(task)),
            Threads::given(Arc::new(SpawnWorkers::new(count, spawn))).unwrap(),
            Threads::given(Arc::new(SpawnWorkers::new(count, |help| help()))).unwrap(),
            Threads::given(Arc::new(SpawnWorkers::new(count, drop))).unwrap(),
        ];
        for threads in all {
            assert_eq!(threads.count(), count);
            for locals in 1..=count {
                run_items(&threads, locals);
            }
        }
    }
}

#[test]
fn at_most_one_worker_per_item_is_called_and_none_for_one_item() {
    let requested = Arc::new(AtomicUsize::new(0));
    let noted = Arc::clone(&requested);
    let threads = given(70, move |workers, task| {
        noted.store(workers, Ordering::Relaxed);
        (0..workers).for_each(task);
    });
    for (items, parallel, expected) in
        [(0, true, 0), (1, true, 0), (9, false, 0), (2, true, 2), (70, true, 70), (71, true, 70)]
    {
        requested.store(0, Ordering::Relaxed);
        let ran = AtomicUsize::new(0);
        let count = |(): &mut (), _| _ = ran.fetch_add(1, Ordering::Relaxed);
        threads.run(items, parallel, &mut [(); 70], count);
        assert_eq!((ran.into_inner(), requested.load(Ordering::Relaxed)), (items, expected));
    }
}

#[test]
fn counts_are_parsed_or_refused() {
    assert_eq!(Threads::parse_count(None).unwrap(), None);
    assert_eq!(Threads::parse_count(Some("3")).unwrap(), Some(3));
    assert_eq!(Threads::parse_count(Some("4096")).unwrap(), Some(THREADS_MAX));
    for wrong in ["0", "-1", "many", "4097", "100000", "99999999999999999999"] {
        let refused = Threads::parse_count(Some(wrong)).unwrap_err();
        assert!(refused.to_string().contains(wrong), "{refused}");
    }
    assert!(Threads::new(Some(0), false).is_err());
    let refused = Threads::new(Some(THREADS_MAX + 1), false).unwrap_err().to_string();
    assert!(refused.contains("4097 threads given, at most 4096 are possible"), "{refused}");
    for (count, words) in [
        (0, "0 workers given, at least 1 is needed"),
        (4097, "4097 workers given, at most 4096 are possible"),
        (usize::MAX, "workers given, at most 4096 are possible"),
    ] {
        let refused = Threads::given(Arc::new(By(count, scoped))).unwrap_err();
        assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
        assert!(refused.to_string().contains(words), "{refused}");
    }
    run_items(&given(THREADS_MAX, |workers, task| (0..workers).for_each(task)), THREADS_MAX);
}

#[test]
fn workers_that_break_their_contract_are_named() {
    let twice = given(4, |workers, task| {
        scoped(workers, task);
        task(3);
    });
    assert_eq!(panic_of(&twice, |_| ()), "Workers::run called worker 3 twice");
    let at_once = given(4, |_, task| scoped(8, &|worker| task(worker / 2)));
    let message = panic_of(&at_once, |_| ());
    assert!(message.starts_with("Workers::run called worker ") && message.ends_with(" twice"));
    let beyond = given(70, |_, task| (0..=70).for_each(task));
    assert_eq!(panic_of(&beyond, |_| ()), "Workers::run called worker 70 of 70");
    let far_beyond = given(2, |_, task| [0, 1, usize::MAX].into_iter().for_each(task));
    let message = format!("Workers::run called worker {} of 2", usize::MAX);
    assert_eq!(panic_of(&far_beyond, |_| ()), message);
    let skips = given(3, |_, task| [0, 2].into_iter().for_each(task));
    let message = "Workers::run returned without a call of worker 1 of 3";
    assert_eq!(panic_of(&skips, |_| ()), message);
    let does_nothing = given(2, |_, _| ());
    let message = "Workers::run returned without a call of worker 0 of 2";
    assert_eq!(panic_of(&does_nothing, |_| ()), message);
    let panics = given(2, |_, _| panic!("in run"));
    assert_eq!(panic_of(&panics, |_| ()), "in run");
}

/// Returns one more worker on each call of `count`.
struct Grows(AtomicUsize);

impl Workers for Grows {
    fn count(&self) -> usize {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
    fn run(&self, workers: usize, task: &(dyn Fn(usize) + Sync)) {
        assert_eq!(workers, 2);
        scoped(workers, task);
    }
}

#[test]
fn the_count_is_read_once() {
    let threads = Threads::given(Arc::new(Grows(AtomicUsize::new(2)))).unwrap();
    run_items(&threads, 2);
    run_items(&threads, 8);
}

/// No two calls get one local, though the workers call an index from many threads at once.
#[test]
fn locals_are_never_shared_whatever_workers_do() {
    let threads = given(2, |_, task| scoped(8, &|worker| task(worker % 3)));
    for _ in 0..200 {
        let mut locals = [false; 2];
        let run = || {
            threads.run(50, true, &mut locals, |local, _| {
                assert!(!std::mem::replace(local, true), "a local in use");
                std::thread::yield_now();
                *local = false;
            });
        };
        let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(message.starts_with("Workers::run called worker "), "{message}");
    }
}

#[test]
fn a_panic_in_a_work_item_reaches_the_caller_and_not_the_workers() {
    let unwound = Arc::new(AtomicBool::new(false));
    let noted = Arc::clone(&unwound);
    let threads = given(3, move |workers, task| {
        let run = AssertUnwindSafe(|| (0..workers).for_each(task));
        noted.fetch_or(catch_unwind(run).is_err(), Ordering::Relaxed);
    });
    let work = |item| assert!(item != 40, "in item {item}");
    assert_eq!(panic_of(&threads, work), "in item 40");
    assert!(!unwound.load(Ordering::Relaxed));
    let spawn = |help: Box<dyn FnOnce() + Send>| _ = std::thread::spawn(help);
    for threads in [
        Threads::new(Some(3), false).unwrap(),
        given(3, scoped),
        Threads::given(Arc::new(SpawnWorkers::new(3, spawn))).unwrap(),
    ] {
        assert_eq!(panic_of(&threads, work), "in item 40");
        run_items(&threads, 3);
    }
}

/// An executor that starts nothing yet gets no more closures than there are helpers, and closures
/// that it starts late help with the operation that runs then.
#[test]
fn closures_do_not_pile_up_and_help_late() {
    type Closures = Arc<Mutex<Vec<Box<dyn FnOnce() + Send>>>>;
    let kept = Closures::default();
    let queue = Arc::clone(&kept);
    let spawn = move |help| queue.lock().unwrap().push(help);
    let threads = Threads::given(Arc::new(SpawnWorkers::new(3, spawn))).unwrap();
    for _ in 0..50 {
        run_items(&threads, 3);
        assert_eq!(kept.lock().unwrap().len(), 2);
    }
    // One begins while a work item waits for it: it runs the other item.
    let both = Barrier::new(2);
    std::thread::scope(|scope| {
        threads.run(2, true, &mut [false; 3], |is_started, item| {
            if item == 0 {
                let late = kept.lock().unwrap().remove(0);
                scope.spawn(late);
            }
            assert!(!std::mem::replace(is_started, true));
            both.wait();
        });
    });
    // The others find nothing to do, or are dropped; then there are places again.
    let mut late = std::mem::take(&mut *kept.lock().unwrap());
    late.pop().unwrap()();
    drop(late);
    run_items(&threads, 3);
    assert_eq!(kept.lock().unwrap().len(), 2);
}

#[cfg(feature = "rayon")]
mod rayon {
    use std::time::Duration;

    use ::rayon::{ThreadPool, ThreadPoolBuilder};

    use super::*;

    fn pool(threads: usize) -> Arc<ThreadPool> {
        Arc::new(ThreadPoolBuilder::new().num_threads(threads).build().unwrap())
    }

    fn on(pool: &Arc<ThreadPool>) -> Threads {
        Threads::given(Arc::new(RayonWorkers::new(Arc::clone(pool)))).unwrap()
    }

    #[test]
    fn items_run_from_outside_and_inside_of_a_pool() {
        for count in [1, 2, 4] {
            let pool = pool(count);
            let threads = on(&pool);
            assert_eq!(threads.count(), count);
            for _ in 0..100 {
                run_items(&threads, count);
                pool.install(|| run_items(&threads, count));
            }
            // On all threads of the pool at once.
            pool.broadcast(|_| (0..100).for_each(|_| run_items(&threads, count)));
        }
        let global = Threads::given(Arc::new(RayonWorkers::global())).unwrap();
        assert_eq!(global.count(), ::rayon::current_num_threads());
        run_items(&global, global.count());
    }

    #[test]
    fn threads_of_the_pool_help() {
        let pool = pool(3);
        let threads = on(&pool);
        for _ in 0..20 {
            let all = Barrier::new(3);
            threads.run(3, true, &mut [(); 3], |(), _| _ = all.wait());
        }
    }

    #[test]
    fn a_busy_pool_delays_nothing() {
        let pool = pool(2);
        let threads = on(&pool);
        let busy = Arc::new(Barrier::new(3));
        for _ in 0..2 {
            let busy = Arc::clone(&busy);
            pool.spawn(move || {
                busy.wait();
                busy.wait();
            });
        }
        busy.wait();
        for _ in 0..100 {
            run_items(&threads, 2);
        }
        busy.wait();
        run_items(&threads, 2);
    }

    /// While an operation waits for its helpers, its thread starts no other job of the pool.
    #[test]
    fn a_waiting_caller_runs_no_other_job() {
        let pool = pool(2);
        let threads = on(&pool);
        let [waits, interrupted] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        pool.install(|| {
            let caller = std::thread::current().id();
            let both = Barrier::new(2);
            threads.run(2, true, &mut [(); 2], |(), _| {
                both.wait();
                if std::thread::current().id() == caller {
                    // Another job for this thread, if it runs jobs while it waits.
                    let (waits, interrupted) = (Arc::clone(&waits), Arc::clone(&interrupted));
                    ::rayon::spawn(move || {
                        let is_here = std::thread::current().id() == caller;
                        let interrupts = is_here && waits.load(Ordering::SeqCst);
                        interrupted.fetch_or(interrupts, Ordering::SeqCst);
                    });
                } else {
                    std::thread::sleep(Duration::from_millis(20));
                }
                waits.store(true, Ordering::SeqCst);
            });
            waits.store(false, Ordering::SeqCst);
        });
        assert!(!interrupted.load(Ordering::SeqCst));
    }
}
