//! Threads that help with a call for as long as it lasts.
//!
//! A thread that sleeps takes 20 us and more to wake, as long as a whole short call. So a call
//! never waits for a helper that has not begun, and one that has helped looks out for the next call
//! for a while before it sleeps ([`LOOKS_FOR`]). It gives its core away meanwhile, and sleeps as
//! soon as somebody took it, so that it stands in nobody's way.
//!
//! Knows nothing of units of work: a helper runs what the caller gave it, once.
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::call::{Call, looks};
use super::place::Place;

/// How long a helper looks out for more before it sleeps: for calls that follow each other at once,
/// as a write and attention do.
const LOOKS_FOR: Duration = Duration::from_micros(200);
/// How long it is away at most when it gives its core away and nobody wants it.
const IS_BACK: Duration = Duration::from_micros(20);

/// Some helpers. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Crew {
    helpers: Vec<JoinHandle<()>>,
    board: Arc<Board>,
}

/// Where callers say what there is to do.
#[derive(Debug)]
struct Board {
    /// Calls so far, which helpers watch.
    calls: AtomicUsize,
    /// The last of them, and its number.
    latest: RwLock<(usize, Option<Arc<Call>>)>,
    seats: Box<[Seat]>,
    is_over: AtomicBool,
}

/// What callers know of a helper.
#[derive(Debug)]
struct Seat {
    /// What it does, a `doing`.
    state: AtomicU8,
    place: OnceLock<Option<Place>>,
}

mod doing {
    pub(super) const HELPS: u8 = 0;
    pub(super) const LOOKS: u8 = 1;
    pub(super) const SLEEPS: u8 = 2;
}

impl Crew {
    pub(crate) fn new(helpers: usize) -> io::Result<Self> {
        let seat = || Seat { state: AtomicU8::new(doing::HELPS), place: OnceLock::new() };
        let board = Arc::new(Board {
            calls: AtomicUsize::new(0),
            latest: RwLock::new((0, None)),
            seats: std::iter::repeat_with(seat).take(helpers).collect(),
            is_over: AtomicBool::new(false),
        });
        let mut crew = Self { helpers: Vec::new(), board: Arc::clone(&board) };
        for index in 0..helpers {
            let board = Arc::clone(&board);
            let thread = thread::Builder::new().name(format!("kv-cpu-{index}"));
            crew.helpers.push(thread.spawn(move || board.serve(index))?);
        }
        Ok(crew)
    }

    pub(crate) fn helpers(&self) -> usize {
        self.helpers.len()
    }

    /// Runs `own` on the calling thread and `help` on so many others at most, once each, as far as
    /// they are there before `own` is done. Ends when all of them have.
    ///
    /// # Panics
    /// When one of them does, once all have ended.
    pub(crate) fn run<H: Fn() + Sync>(&self, helpers: usize, own: impl FnOnce(), help: &H) {
        Call::open(help, helpers, |call| {
            self.board.announce(Arc::clone(call));
            self.wake(helpers);
            own();
        });
    }

    /// Wakes as many as it takes for so many to be awake and without work.
    fn wake(&self, mut helpers: usize) {
        for (thread, seat) in self.helpers.iter().zip(&self.board.seats) {
            if helpers == 0 {
                return;
            }
            match seat.state.load(Ordering::SeqCst) {
                doing::HELPS => continue,
                doing::SLEEPS => {
                    if let Some(place) = seat.place() {
                        place.leave_to_caller();
                    }
                    thread.thread().unpark();
                }
                _ => {}
            }
            helpers = helpers.saturating_sub(1);
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.board.is_over.store(true, Ordering::SeqCst);
        self.board.calls.fetch_add(1, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // What a helper runs never unwinds: a call keeps panics for its caller.
            let _ended = helper.join();
        }
    }
}

impl Board {
    fn announce(&self, call: Arc<Call>) {
        let mut latest = self.latest.write().unwrap_or_else(PoisonError::into_inner);
        let number = self.calls.load(Ordering::SeqCst).wrapping_add(1);
        *latest = (number, Some(call));
        self.calls.store(number, Ordering::SeqCst);
    }

    /// What a helper does all its life.
    fn serve(&self, index: usize) {
        let Some(seat) = self.seats.get(index) else {
            return;
        };
        seat.place.get_or_init(Place::own);
        let (mut seen, mut since) = (0, Instant::now());
        loop {
            self.wait(seat, seen, since);
            if self.is_over.load(Ordering::SeqCst) {
                return;
            }
            let latest = self.latest.read().unwrap_or_else(PoisonError::into_inner).clone();
            seen = latest.0;
            seat.state.store(doing::HELPS, Ordering::SeqCst);
            if latest.1.is_some_and(|call| call.help()) {
                since = Instant::now();
            }
        }
    }

    /// Waits for a call after the one that was seen last, awake until some time after `since`.
    fn wait(&self, seat: &Seat, seen: usize, since: Instant) {
        seat.state.store(doing::LOOKS, Ordering::SeqCst);
        let mut now = Instant::now();
        while now.duration_since(since) < LOOKS_FOR {
            if looks(|| self.calls.load(Ordering::SeqCst) != seen) {
                return;
            }
            let left = Instant::now();
            thread::yield_now();
            now = Instant::now();
            if now.duration_since(left) > IS_BACK {
                break;
            }
        }
        if let Some(place) = seat.place() {
            place.leave_free();
        }
        // Callers look at the state after they have counted their call, and the count is looked at
        // after the state is set: one of both sees the other.
        seat.state.store(doing::SLEEPS, Ordering::SeqCst);
        while self.calls.load(Ordering::SeqCst) == seen {
            thread::park();
        }
    }
}

impl Seat {
    fn place(&self) -> Option<&Place> {
        self.place.get().and_then(Option::as_ref)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;

    use super::*;

    /// Waits until all helpers sleep, and says whether they do before long.
    fn all_sleep(crew: &Crew) -> bool {
        let since = Instant::now();
        let sleeps = |seat: &Seat| seat.state.load(Ordering::SeqCst) == doing::SLEEPS;
        while !crew.board.seats.iter().all(sleeps) {
            if since.elapsed() > Duration::from_mins(1) {
                return false;
            }
            thread::yield_now();
        }
        true
    }

    /// Whether they sleep or look out, all that are wanted come, and no more.
    #[test]
    fn helpers_come_when_there_is_time() {
        let crew = Crew::new(3).unwrap();
        for asleep in [false, true, false] {
            for wanted in 0..=3 {
                assert!(!asleep || all_sleep(&crew), "helpers look out for a while only");
                let came = AtomicUsize::new(0);
                let all = Barrier::new(wanted + 1);
                let help = || {
                    came.fetch_add(1, Ordering::SeqCst);
                    all.wait();
                };
                crew.run(wanted, || _ = all.wait(), &help);
                assert_eq!(came.into_inner(), wanted);
            }
        }
    }

    #[test]
    fn nobody_enters_a_call_that_is_over() {
        let crew = Crew::new(1).unwrap();
        for round in 0..2000 {
            let is_over = AtomicBool::new(false);
            let (mut begun, late) = (0, AtomicUsize::new(0));
            let help = || {
                late.fetch_add(usize::from(is_over.load(Ordering::SeqCst)), Ordering::SeqCst);
            };
            crew.run(1, || begun += 1, &help);
            is_over.store(true, Ordering::SeqCst);
            if round % 100 == 0 {
                assert!(all_sleep(&crew), "a call leaves no helper waiting");
            }
            assert_eq!((begun, late.into_inner()), (1, 0));
        }
    }

    /// Callers that share helpers each get all of their own work done.
    #[test]
    fn callers_may_come_together() {
        let crew = Crew::new(2).unwrap();
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let left = AtomicUsize::new(50);
                        let work = || {
                            let take = |left: usize| left.checked_sub(1);
                            let taken = Ordering::SeqCst;
                            while left.fetch_update(taken, taken, take).is_ok() {}
                        };
                        crew.run(2, work, &work);
                        assert_eq!(left.into_inner(), 0);
                    }
                });
            }
        });
    }

    #[test]
    fn panics_reach_the_caller_and_helpers_survive() {
        let crew = Crew::new(1).unwrap();
        let both = Barrier::new(2);
        let help = || {
            both.wait();
            panic!("in a helper");
        };
        let run = || crew.run(1, || _ = both.wait(), &help);
        let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"in a helper"));

        let ended = AtomicBool::new(false);
        let help = || {
            both.wait();
            thread::sleep(Duration::from_millis(20));
            ended.store(true, Ordering::SeqCst);
        };
        let own = || {
            both.wait();
            panic!("in the caller");
        };
        catch_unwind(AssertUnwindSafe(|| crew.run(1, own, &help))).unwrap_err();
        assert!(ended.into_inner(), "the helper was waited for, though the caller panicked");
    }
}
