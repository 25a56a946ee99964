//! How many threads the matrix products use.

/// Sees to it that candle finds the number of threads in the environment.
///
/// candle 0.11 asks for it before every matrix product, and where `RAYON_NUM_THREADS` does not say
/// it, reads `/proc/cpuinfo` each time: for a small model ten times the work of the product itself.
/// A process cannot safely change its own environment, so the program starts itself once more, in
/// place, with the number set. Where that is not possible it runs on, only slower.
#[cfg(unix)]
pub(crate) fn settle() {
    use std::os::unix::process::CommandExt;

    const NAME: &str = "RAYON_NUM_THREADS";
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
    // Answers only when it failed.
    let _error = again.args(arguments).env(NAME, number.to_string()).exec();
}

/// Elsewhere the number is cheap to find.
#[cfg(not(unix))]
pub(crate) fn settle() {}
