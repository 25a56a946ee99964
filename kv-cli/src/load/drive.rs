//! Sends each request at its time, whatever the outcome of earlier requests.
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use tokio::sync::{Semaphore, mpsc};

use super::client::{Answer, Client, Failure};
use super::wire::Usage;
use super::workload::Workload;

/// Requests whose bodies are made before their time has come.
const AHEAD: usize = 256;

/// A request that ended.
#[derive(Debug)]
pub(super) struct Sample {
    /// Time at which the request was sent, from the beginning.
    pub(super) at: Duration,
    /// Delay after its due time.
    pub(super) late: Duration,
    /// Until the first text came.
    pub(super) first: Option<Duration>,
    pub(super) whole: Duration,
    /// `None` if the answer says nothing of its tokens.
    pub(super) result: Result<Option<Usage>, Failure>,
}

/// The measurements of a run.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) samples: Vec<Sample>,
    /// From one text to the next, of requests that succeeded.
    pub(super) gaps: Vec<Duration>,
    /// From the begin to the end of the last request.
    pub(super) elapsed: Duration,
}

/// Sends a workload, at most `connections` requests at once, until all have ended or Ctrl-C is
/// pressed.
pub(super) async fn drive(
    workload: Arc<Workload>,
    client: Arc<Client>,
    model: Arc<str>,
    connections: Option<usize>,
    bar: &ProgressBar,
) -> anyhow::Result<Measured> {
    let (answers, mut ended) = mpsc::unbounded_channel();
    let sending = tokio::spawn(send(workload, client, model, connections, answers));
    let mut measured = Measured::default();
    let mut failed = 0_u64;
    let mut stop = std::pin::pin!(tokio::signal::ctrl_c());
    loop {
        let sample = tokio::select! {
            sample = ended.recv() => sample,
            _ = &mut stop => {
                sending.abort();
                break;
            }
        };
        let Some((sample, gaps)) = sample else {
            sending.await??;
            break;
        };
        bar.inc(1);
        if sample.result.is_ok() {
            measured.gaps.extend(gaps);
        } else {
            failed += 1;
            bar.set_message(format!("{failed} failed"));
        }
        let end = sample.at + sample.whole;
        measured.elapsed = measured.elapsed.max(end);
        measured.samples.push(sample);
    }
    measured.samples.sort_by_key(|sample| sample.at);
    Ok(measured)
}

type Ended = mpsc::UnboundedSender<(Sample, Vec<Duration>)>;

/// Sends every request; returns when the last one has been handed to its task.
async fn send(
    workload: Arc<Workload>,
    client: Arc<Client>,
    model: Arc<str>,
    connections: Option<usize>,
    ended: Ended,
) -> anyhow::Result<()> {
    let places = Arc::new(Semaphore::new(connections.unwrap_or(Semaphore::MAX_PERMITS)));
    let (bodies, mut made) = mpsc::channel(AHEAD);
    // A long prompt takes a while to write, and must not delay the requests before it.
    let maker = tokio::task::spawn_blocking({
        let client = Arc::clone(&client);
        move || {
            for planned in workload.planned() {
                let prompt = workload.prompt(planned);
                let body = client.body(&model, &prompt, planned.max_new_tokens);
                if bodies.blocking_send(body.map(|body| (planned.due, body))).is_err() {
                    break;
                }
            }
        }
    });
    let mut begin = None;
    while let Some(made) = made.recv().await {
        let (due, body) = made?;
        let begin = *begin.get_or_insert_with(Instant::now);
        let due = begin.checked_add(due).unwrap_or(begin);
        tokio::time::sleep_until(due.into()).await;
        let (places, client, ended) = (Arc::clone(&places), Arc::clone(&client), ended.clone());
        tokio::spawn(async move {
            // The semaphore is never closed.
            let place = places.acquire().await;
            let Answer { sent, first, gaps, whole, result } = client.complete(body).await;
            drop(place);
            let late = sent.saturating_duration_since(due);
            let at = sent.saturating_duration_since(begin);
            // Without a receiver Ctrl-C was pressed.
            let _ = ended.send((Sample { at, late, first, whole, result }, gaps));
        });
    }
    maker.await?;
    Ok(())
}
