//! Attention over cached K and V in this library and in others: the same values, the same threads,
//! in one process.
//!
//! Before a contender is timed, its outputs are compared with ours: a contender with other outputs
//! is reported and not timed. Then contenders run interleaved, so that other load on the machine
//! affects all of them; the median over all rounds is reported.
mod candle;
mod case;
mod child;
mod ours;
mod report;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Result;
use case::{Case, Tensors};
use child::Child;
use report::Timed;
pub(crate) use report::{Measured, Report};

use crate::Options;

/// Rounds of each contender, and of a slow one.
const ROUNDS: usize = 9;
const ROUNDS_SLOW: usize = 3;
/// A run of this length that also takes `SLOWER` times as long as the fastest contender's is slow.
const SLOW: Duration = Duration::from_millis(100);
const SLOWER: u32 = 4;
/// A run of this length needs no warm-up.
const LONG: Duration = Duration::from_millis(700);
/// A slow run of this length is not repeated: the run whose outputs were compared is its time.
const ONCE: Duration = Duration::from_secs(4);
/// Time that the runs of one round take together; shorter runs are repeated.
const ROUND: Duration = Duration::from_millis(15);
const RUNS_MAX: u128 = 50;
/// Pause between two rounds, in which the threads of the last contender stop spinning. After 5 ms
/// some still spin, and a call of 20 us with two threads takes half as long again.
const PAUSE: Duration = Duration::from_millis(20);

/// A contender that was this many times slower than the fastest in a smaller case, and would need
/// [`TOO_SLOW_SECONDS`] for one run by its rate there, is not run.
const TOO_SLOW: f64 = 10.0;
const TOO_SLOW_SECONDS: f64 = 5.0;

/// Contenders that were many times slower than the fastest, by kind of case and name: seconds per
/// floating-point operation.
type TooSlow = BTreeMap<(bool, String, String), f64>;

/// One implementation of a case, with tensors in its own form.
trait Contender {
    /// Computes `times` times; returns the time of each run.
    fn round(&mut self, times: usize) -> Result<Vec<Duration>>;
    /// Returns the outputs as `[tokens, q_heads, head_dim]`, of an earlier run or of another one.
    fn output(&mut self) -> Result<Vec<f32>>;
}

/// Measures every case whose name contains all filters.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let threads = rayon::current_num_threads();
    let mut report = Report::new(threads);
    let no_python = || anyhow::anyhow!("not installed: `cargo xtask bench peers --install`");
    let python = options.python.as_deref().ok_or_else(no_python);
    let child = match python.and_then(|python| Child::start(python, threads)) {
        Ok(child) => {
            report.python(&child.hello);
            Some(Rc::new(RefCell::new(child)))
        }
        Err(error) => {
            report.no_python(&error);
            None
        }
    };
    if !options.json {
        print!("{}", report.head());
    }
    let mut cases = case::cases(options.is_full);
    cases.retain(|case| {
        let name = case.to_string();
        options.filters.iter().all(|filter| name.contains(filter))
    });
    let mut too_slow = TooSlow::new();
    for case in &cases {
        let measured = measure(case, child.as_ref(), &too_slow)?;
        too_slow.extend(measured.slower(TOO_SLOW).map(|(name, rate)| (kind(case, name), rate)));
        if !options.json {
            print!("{}", measured.text());
        }
        report.cases.push(measured);
    }
    Ok(report)
}

fn kind(case: &Case, name: &str) -> (bool, String, String) {
    (case.is_decode(), case.format.to_string(), name.to_owned())
}

struct Entry {
    name: String,
    contender: Box<dyn Contender>,
    error: f64,
    /// Time of the first run after a warm-up.
    first: Duration,
    samples: Vec<Duration>,
}

fn measure(
    case: &Case,
    child: Option<&Rc<RefCell<Child>>>,
    too_slow: &TooSlow,
) -> Result<Measured> {
    let folder = tempfile::tempdir()?;
    let mut refused = BTreeMap::new();
    let offered = contenders(case, child, folder.path(), &mut refused)?;
    let mut entries: Vec<Entry> = Vec::new();
    let mut expected = Vec::new();
    for (name, mut contender) in offered {
        let seconds = too_slow.get(&kind(case, &name)).map_or(0.0, |rate| rate * case.flop_f64());
        if seconds > TOO_SLOW_SECONDS {
            let reason = format!("would take {seconds:.0} s, by its rate in a smaller case");
            refused.insert(name, reason);
            continue;
        }
        match check(contender.as_mut(), &expected, case.error_max()) {
            Ok((outputs, error, first)) => {
                if expected.is_empty() {
                    expected = outputs;
                }
                entries.push(Entry { name, contender, error, first, samples: Vec::new() });
            }
            // Without our outputs there is nothing to compare with.
            Err(error) if expected.is_empty() => return Err(error),
            Err(error) => _ = refused.insert(name, format!("{error:#}")),
        }
    }
    let fastest = entries.iter().map(|entry| entry.first).min().unwrap_or_default();
    let slow = SLOW.max(fastest.saturating_mul(SLOWER));
    for round in 0..ROUNDS {
        for entry in &mut entries {
            let is_slow = entry.first > slow;
            if is_slow && entry.first > ONCE {
                entry.samples = vec![entry.first];
                continue;
            }
            if is_slow && round >= ROUNDS_SLOW {
                continue;
            }
            std::thread::sleep(PAUSE);
            let times = ROUND.as_nanos() / entry.first.as_nanos().max(1);
            let times = usize::try_from(times.clamp(1, RUNS_MAX))?;
            // The first of several runs wakes threads and fills caches.
            let took = entry.contender.round(times + usize::from(times > 1))?;
            entry.samples.extend(took.into_iter().skip(usize::from(times > 1)));
        }
    }
    let timed = entries.into_iter().map(|entry| Timed::new(entry.name, entry.error, entry.samples));
    Ok(Measured::new(case, timed.collect(), refused))
}

type Offered = Vec<(String, Box<dyn Contender>)>;

/// Returns our contender, then the peers that can run the case.
fn contenders(
    case: &Case,
    child: Option<&Rc<RefCell<Child>>>,
    folder: &Path,
    refused: &mut BTreeMap<String, String>,
) -> Result<Offered> {
    let tensors = Tensors::random(case)?;
    let mut all: Offered = vec![(report::OURS.into(), Box::new(ours::Ours::new(*case, &tensors)?))];
    if !case.format.is_quantised() {
        let matmul = candle::Matmul::new(*case, &tensors);
        let flash = candle::Flash::new(*case, &tensors);
        let mut add = |name: &str, made: Result<Box<dyn Contender>>| match made {
            Ok(contender) => all.push((name.to_owned(), contender)),
            Err(error) => _ = refused.insert(name.to_owned(), format!("{error:#}")),
        };
        add("candle matmul", matmul.map(|made| Box::new(made) as Box<dyn Contender>));
        add("candle flash", flash.map(|made| Box::new(made) as Box<dyn Contender>));
    }
    if let Some(child) = child {
        tensors.save(folder)?;
        drop(tensors);
        let offer = child::prepare(child, case, folder)?;
        refused.extend(offer.refused);
        for remote in offer.contenders {
            all.push((remote.name.clone(), Box::new(remote)));
        }
        for name in ["q", "k", "v"] {
            std::fs::remove_file(folder.join(name))?;
        }
    }
    Ok(all)
}

/// Runs a contender cold and then warm; returns its outputs, their error, and the time of the
/// second run.
fn check(
    contender: &mut dyn Contender,
    expected: &[f32],
    error_max: f64,
) -> Result<(Vec<f32>, f64, Duration)> {
    let begin = Instant::now();
    let cold = contender.round(1)?.pop().unwrap_or_else(|| begin.elapsed());
    let warm = if cold > LONG { cold } else { contender.round(1)?.pop().unwrap_or(cold) };
    let outputs = contender.output()?;
    if expected.is_empty() {
        return Ok((outputs, 0.0, warm));
    }
    anyhow::ensure!(
        outputs.len() == expected.len(),
        "gave {} values, expected {}",
        outputs.len(),
        expected.len()
    );
    let sum = |terms: &mut dyn Iterator<Item = f64>| terms.sum::<f64>();
    let pairs = || outputs.iter().zip(expected).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let difference = sum(&mut pairs().map(|(a, b)| (a - b).powi(2)));
    let error = (difference / sum(&mut pairs().map(|(_, b)| b.powi(2)))).sqrt();
    // A NaN must not pass.
    anyhow::ensure!(error <= error_max, "computes something else: outputs are {error:.1e} off");
    Ok((outputs, error, warm))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns fixed outputs.
    struct Fixed(Vec<f32>);

    impl Contender for Fixed {
        fn round(&mut self, times: usize) -> Result<Vec<Duration>> {
            Ok(vec![Duration::from_nanos(1); times])
        }

        fn output(&mut self) -> Result<Vec<f32>> {
            Ok(self.0.clone())
        }
    }

    #[test]
    fn wrong_outputs_are_detected() {
        let expected = [3.0, -4.0];
        let check = |outputs: &[f32]| check(&mut Fixed(outputs.to_vec()), &expected, 1e-2);
        assert_eq!(check(&expected).unwrap().1, 0.0);
        let (_, error, _) = check(&[3.0, -4.02]).unwrap();
        assert!((error - 4e-3).abs() < 1e-6, "{error}");
        for wrong in [&[3.0, 4.0][..], &[3.0, f32::NAN], &[3.0]] {
            assert!(check(wrong).is_err(), "{wrong:?}");
        }
    }

    /// Our outputs and candle's agree on the same tensors, in each of the three layouts, in decode
    /// and in prefill.
    #[test]
    fn ours_and_candle_agree() {
        for case in case::cases(true).into_iter().filter(|case| case.context == 512) {
            if case.batch > 1 || case.head_dim > 64 {
                continue;
            }
            let measured = measure(&case, None, &TooSlow::new()).unwrap();
            assert!(measured.refused().is_empty(), "{case}: {:?}", measured.refused());
        }
    }
}
