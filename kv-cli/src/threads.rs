//! The number of threads of the matrix products.
use anyhow::bail;

/// The variable that candle and rayon read.
const NAME: &str = "RAYON_NUM_THREADS";

/// Most threads of the CPU backend: starting more can end the process.
const THREADS_MAX: usize = 4096;

/// Refuses a number of threads in the environment that cannot be started.
pub(crate) fn check() -> anyhow::Result<()> {
    let given = std::env::var(NAME).unwrap_or_default();
    match given.trim().parse::<u128>() {
        Ok(threads) if threads > u128::try_from(THREADS_MAX)? => {
            bail!("{NAME} is {given}, at most {THREADS_MAX} threads are possible")
        }
        _ => Ok(()),
    }
}

/// Makes sure that candle finds the number of threads in the environment.
///
/// candle 0.11 needs it before every matrix product, and without `RAYON_NUM_THREADS` it reads
/// `/proc/cpuinfo` each time: for a small model, ten times the work of the product itself. A
/// process cannot safely change its own environment, so the program executes itself again with the
/// variable set. If that fails it continues, only slower.
#[cfg(unix)]
pub(crate) fn settle() {
    use std::os::unix::process::CommandExt;

    let given = std::env::var(NAME).ok().and_then(|number| number.parse::<usize>().ok());
    if given.is_some_and(|number| number > 0) {
        return;
    }
    let (Ok(number), Ok(program)) = (std::thread::available_parallelism(), std::env::current_exe())
    else {
        return;
    };
    let mut arguments = std::env::args_os();
    let mut again = std::process::Command::new(program);
    if let Some(name) = arguments.next() {
        again.arg0(name);
    }
    // Returns only if it failed.
    let _error = again.args(arguments).env(NAME, number.to_string()).exec();
}

/// On other systems the number is cheap to find.
#[cfg(not(unix))]
pub(crate) fn settle() {}
