//! The thread that owns the scheduler, and with it the cache.
//!
//! Requests come by one channel and are taken between steps. Each text has a channel of its own for
//! what it generates; when its receiver is dropped, because a client has gone or a stop string was
//! found, the text is cancelled before the next step and its blocks are free. Nothing here knows
//! HTTP, JSON or text.
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use kv::engine::{
    Engine as Scheduler, EngineError, Event, Finish, OutputError, Request, RequestError, Sampler,
};
use kv::eviction::Return;
use kv_events::Publisher;
use kv_runner::Decoder;
use tokio::sync::{mpsc, oneshot};

use super::metrics::Metrics;
use super::watch::TierWatch;
use super::{leaks, publish};
use crate::num::to_usize;
use crate::output;

/// A prompt, and how it is continued.
#[derive(Debug)]
pub(super) struct Prompt {
    pub(super) tokens: Vec<u32>,
    /// Lengths at which recurrent states are kept for other prompts, ascending.
    pub(super) stops: Vec<u32>,
    pub(super) max_new_tokens: u32,
    /// One for each text; at least one.
    pub(super) samplers: Vec<Sampler>,
    /// Prompts share blocks only with those of an equal salt.
    pub(super) salt: Vec<u8>,
    /// Whether and when the client expects to continue the text.
    pub(super) hint: Option<Return>,
    /// Whether texts go on after an end-of-text token.
    pub(super) ignore_eos: bool,
}

/// A change of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Update {
    /// The first update of a text: the tokens of its prompt that were cached.
    Started { cached: usize },
    /// Its next token, which is part of the text.
    Token(u32),
    /// Its end: the tokens that were generated, an end-of-text token included, and those of the
    /// prompt that were cached.
    Finished { finish: Finish, tokens: usize, cached: usize },
    /// The engine failed, or is being stopped.
    Failed(String),
}

/// A prompt that does not run.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    /// Prompt and new tokens are longer than a text of the model.
    #[error("the prompt has {prompt} tokens, and {new} new ones, the model's context is {context}")]
    TooLong { prompt: usize, new: u32, context: u32 },
    /// The same, by the length of the prompt alone.
    #[error(
        "the prompt has {bytes} bytes, which are {tokens} tokens at least, the model's context is \
         {context}"
    )]
    TooManyBytes { bytes: usize, tokens: usize, context: u32 },
    /// Also an empty queue would be too short.
    #[error("the request has {texts} texts, prompts times n, at most {max} may wait")]
    TooManyTexts { texts: usize, max: usize },
    /// Later there may be room.
    #[error("{waiting} texts wait, and {texts} would be more than {max}")]
    QueueFull { waiting: usize, texts: usize, max: usize },
    /// The server is being stopped.
    #[error("the server is stopping")]
    Stopping,
    /// It could not run alone either.
    #[error(transparent)]
    Never(#[from] RequestError),
}

/// The way from a request to the engine.
#[derive(Debug, Clone)]
pub(super) struct Engine {
    messages: Sender<Message>,
    is_stopping: Arc<AtomicBool>,
    queue: Arc<Queue>,
    metrics: Arc<Metrics>,
}

/// The texts that wait.
#[derive(Debug)]
struct Queue {
    max: usize,
    /// Number of waiting texts when the engine last counted.
    waiting: AtomicUsize,
    /// Texts of requests that the engine has not taken yet.
    coming: AtomicUsize,
}

/// Room in the queue for the texts of a request, from before its prompts are tokenised until the
/// engine takes it.
#[derive(Debug)]
pub(super) struct Place {
    queue: Arc<Queue>,
    texts: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        let before = self.queue.coming.fetch_sub(self.texts, Ordering::SeqCst);
        assert!(before >= self.texts, "a place was counted when it was taken");
    }
}

impl Queue {
    /// Publishes the texts that wait, and those that run.
    fn publish(&self, queued: (usize, usize), metrics: &Metrics) {
        self.waiting.store(queued.0, Ordering::SeqCst);
        metrics.note_queued(queued);
    }

    /// Refuses texts that are more than there is room for beside those that wait.
    fn check(&self, waiting: usize, texts: usize) -> Result<(), Refused> {
        let max = self.max;
        if texts > max {
            return Err(Refused::TooManyTexts { texts, max });
        }
        if waiting + texts > max {
            return Err(Refused::QueueFull { waiting, texts, max });
        }
        Ok(())
    }
}

#[derive(Debug)]
enum Message {
    Submit {
        prompts: Vec<(Prompt, Vec<UpdateSender>)>,
        place: Place,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    /// Look at `is_stopping`.
    Wake,
}

/// The engine's end of a text's channel.
#[derive(Debug)]
pub(super) struct UpdateSender {
    sender: mpsc::UnboundedSender<Update>,
    /// Whether the receiver was closed because the text has a stop string.
    met_stop: Arc<AtomicBool>,
}

/// The client's end. When it is closed or dropped, the text is cancelled before the next step.
#[derive(Debug)]
pub(super) struct UpdateReceiver {
    receiver: mpsc::UnboundedReceiver<Update>,
    met_stop: Arc<AtomicBool>,
}

/// Makes the channel of a text.
pub(super) fn text_channel() -> (UpdateSender, UpdateReceiver) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let met_stop = Arc::new(AtomicBool::new(false));
    let updates = UpdateSender { sender, met_stop: Arc::clone(&met_stop) };
    (updates, UpdateReceiver { receiver, met_stop })
}

impl UpdateSender {
    /// Sends an update. A receiver that is gone is noticed before the next step.
    pub(super) fn send(&self, update: Update) {
        let _ = self.sender.send(update);
    }

    /// Returns how the text ended, if nothing receives it any more: with a stop string, or because
    /// its client has gone.
    pub(super) fn finish_if_closed(&self) -> Option<Finish> {
        self.sender.is_closed().then(|| {
            if self.met_stop.load(Ordering::SeqCst) { Finish::Stop } else { Finish::Cancelled }
        })
    }
}

impl UpdateReceiver {
    /// Receives the next update; `None` if the engine has ended.
    pub(super) async fn recv(&mut self) -> Option<Update> {
        self.receiver.recv().await
    }

    pub(super) fn close(&mut self) {
        self.receiver.close();
    }

    /// Closes the channel of a text that has met a stop string.
    pub(super) fn close_at_stop(&mut self) {
        self.met_stop.store(true, Ordering::SeqCst);
        self.close();
    }
}

impl Engine {
    /// Makes the two ends of the channel; at most `max_queue` texts wait in it.
    pub(super) fn new(max_queue: usize, metrics: Arc<Metrics>) -> (Self, Inbox) {
        let (messages, receiver) = channel();
        let is_stopping = Arc::new(AtomicBool::new(false));
        let (waiting, coming) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let queue = Arc::new(Queue { max: max_queue, waiting, coming });
        let inbox =
            Inbox { receiver, is_stopping: Arc::clone(&is_stopping), queue: Arc::clone(&queue) };
        (Self { messages, is_stopping, queue, metrics }, inbox)
    }

    /// Takes room for a request of this many texts, as far as is known without the engine, which
    /// counts them again when it takes the request.
    pub(super) fn reserve(&self, texts: usize) -> Result<Place, Refused> {
        if self.is_stopping() {
            return Err(self.refuse(Refused::Stopping));
        }
        let queue = &self.queue;
        let mut coming = queue.coming.load(Ordering::SeqCst);
        loop {
            let waiting = queue.waiting.load(Ordering::SeqCst) + coming;
            queue.check(waiting, texts).map_err(|refused| self.refuse(refused))?;
            let more = coming + texts;
            let swapped =
                queue.coming.compare_exchange(coming, more, Ordering::SeqCst, Ordering::SeqCst);
            match swapped {
                Ok(_) => return Ok(Place { queue: Arc::clone(queue), texts }),
                Err(other) => coming = other,
            }
        }
    }

    /// Counts a refusal of which the engine does not hear.
    pub(super) fn refuse(&self, refused: Refused) -> Refused {
        self.metrics.note_refused(&refused);
        refused
    }

    /// Hands the prompts of a request over; returns a receiver for each text, those of the first
    /// prompt first. A text ends when its receiver is dropped.
    ///
    /// # Errors
    /// [`Refused`]; nothing runs then.
    pub(super) async fn submit(
        &self,
        prompts: Vec<Prompt>,
        place: Place,
    ) -> Result<Vec<UpdateReceiver>, Refused> {
        if self.is_stopping() {
            return Err(self.refuse(Refused::Stopping));
        }
        let mut receivers = Vec::new();
        let with_texts = prompts.into_iter().map(|prompt| {
            let channels = prompt.samplers.iter().map(|_| text_channel());
            let (texts, of_prompt): (Vec<_>, Vec<_>) = channels.unzip();
            receivers.extend(of_prompt);
            (prompt, texts)
        });
        let prompts = with_texts.collect();
        let (answer, answered) = oneshot::channel();
        let message = Message::Submit { prompts, place, answer };
        self.messages.send(message).map_err(|_| Refused::Stopping)?;
        answered.await.map_err(|_| Refused::Stopping)??;
        Ok(receivers)
    }

    /// Lets running texts end, and refuses all others.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        // The engine may be gone already.
        let _ = self.messages.send(Message::Wake);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::SeqCst)
    }
}

/// The engine's end of the channel.
#[derive(Debug)]
pub(super) struct Inbox {
    receiver: Receiver<Message>,
    is_stopping: Arc<AtomicBool>,
    queue: Arc<Queue>,
}

/// Limits of the engine.
#[derive(Debug, Clone)]
pub(super) struct EngineOptions {
    /// Tokens of the longest text.
    pub(super) context: u32,
    /// Longest that running texts may take once the engine is stopped.
    pub(super) drain: Duration,
    /// End-of-text tokens.
    pub(super) eos: Vec<u32>,
}

/// Interval at which tiers are polled and metrics are published while nothing runs.
const IDLE: Duration = Duration::from_millis(100);

/// Failed steps in a row after which the engine gives up.
const FAILURES_MAX: u32 = 3;

/// Runs until the engine is stopped and its texts have ended.
///
/// # Errors
/// The scheduler's, if several steps in a row fail.
pub(super) fn run(
    (scheduler, model): (Scheduler, &Decoder),
    inbox: &Inbox,
    options: EngineOptions,
    (metrics, watch, publisher): (&Metrics, TierWatch, Option<Publisher>),
) -> anyhow::Result<()> {
    let queue = &inbox.queue;
    let listeners = HashMap::new();
    let failures = 0;
    let mut engine =
        Worker { scheduler, model, options, metrics, queue, watch, publisher, listeners, failures };
    let mut stop_at = None;
    engine.note_state();
    loop {
        if !engine.scheduler.has_work() {
            if inbox.is_stopping.load(Ordering::SeqCst) {
                return engine.finish();
            }
            match inbox.receiver.recv_timeout(IDLE) {
                Ok(message) => engine.take(message),
                Err(RecvTimeoutError::Timeout) => engine.scheduler.poll_tiers()?,
                Err(RecvTimeoutError::Disconnected) => return engine.finish(),
            }
        }
        while let Ok(message) = inbox.receiver.try_recv() {
            engine.take(message);
        }
        engine.cancel_where(|listener| listener.updates.finish_if_closed());
        if inbox.is_stopping.load(Ordering::SeqCst) {
            let now = Instant::now();
            let end = *stop_at.get_or_insert(now.checked_add(engine.options.drain).unwrap_or(now));
            if now >= end {
                engine.fail_all("the server was stopped");
            }
        }
        engine.step()?;
    }
}

/// The receiver of a text's updates.
#[derive(Debug)]
struct Listener {
    updates: UpdateSender,
    submitted: Instant,
    ignore_eos: bool,
    has_started: bool,
}

/// The scheduler, and the listeners of its texts.
struct Worker<'a> {
    scheduler: Scheduler,
    model: &'a Decoder,
    options: EngineOptions,
    metrics: &'a Metrics,
    queue: &'a Queue,
    watch: TierWatch,
    /// What routers hear of the cache.
    publisher: Option<Publisher>,
    /// By the scheduler's number.
    listeners: HashMap<usize, Listener>,
    /// Failed steps in a row.
    failures: u32,
}

impl Worker<'_> {
    fn take(&mut self, message: Message) {
        let Message::Submit { prompts, place, answer } = message else { return };
        // From here on its texts wait, or are gone.
        drop(place);
        let answered = self.submit(prompts);
        self.metrics.note_request(&answered);
        self.queue.publish(self.scheduler.queued(), self.metrics);
        // The client may have gone meanwhile; its texts are cancelled before the next step.
        let _ = answer.send(answered);
    }

    /// Takes all prompts of a request, or none.
    fn submit(&mut self, prompts: Vec<(Prompt, Vec<UpdateSender>)>) -> Result<(), Refused> {
        let (waiting, _) = self.scheduler.queued();
        self.queue.check(waiting, prompts.iter().map(|(_, texts)| texts.len()).sum())?;
        let mut taken = Vec::new();
        for (prompt, texts) in prompts {
            match self.submit_one(prompt, texts) {
                Ok(numbers) => taken.extend(numbers),
                Err(refused) => {
                    for number in taken {
                        self.listeners.remove(&number);
                        self.scheduler.cancel(number);
                    }
                    return Err(refused);
                }
            }
        }
        Ok(())
    }

    fn submit_one(
        &mut self,
        prompt: Prompt,
        texts: Vec<UpdateSender>,
    ) -> Result<Range<usize>, Refused> {
        let (tokens, new, context) =
            (prompt.tokens.len(), prompt.max_new_tokens, self.options.context);
        if tokens.saturating_add(to_usize(new)) > to_usize(context) {
            return Err(Refused::TooLong { prompt: tokens, new, context });
        }
        let ignore_eos = prompt.ignore_eos;
        let mut samplers = prompt.samplers.into_iter();
        let request = Request {
            sampler: samplers.next().unwrap_or_else(Sampler::greedy),
            salt: prompt.salt,
            hint: prompt.hint,
            stops: prompt.stops,
            ignore_stop: ignore_eos,
            ..Request::new(prompt.tokens, prompt.max_new_tokens)
        };
        let numbers = self.scheduler.submit_choices(request, samplers.collect())?;
        let submitted = Instant::now();
        for (number, updates) in numbers.clone().zip(texts) {
            let listener = Listener { updates, submitted, ignore_eos, has_started: false };
            self.listeners.insert(number, listener);
        }
        Ok(numbers)
    }

    fn step(&mut self) -> anyhow::Result<()> {
        if !self.scheduler.has_work() {
            self.note_state();
            return Ok(());
        }
        let begun = Instant::now();
        match self.compute() {
            Ok(events) => {
                self.failures = 0;
                self.metrics.note_step(begun.elapsed());
                for event in events {
                    self.deliver(event);
                }
            }
            // The text is the cause: the others go on, and the step is computed without it.
            Err(EngineError::Output(error @ OutputError::NotFinite { request })) => {
                output::note(&format!("a text failed: {error}"))?;
                self.fail(request, "the model gave a logit that is not a number");
            }
            Err(error) => {
                let error = anyhow::Error::from(error);
                output::note(&format!("a step failed: {}", crate::failure::describe(&error)))?;
                self.fail_all("the engine failed");
                self.failures += 1;
                if self.failures >= FAILURES_MAX {
                    return Err(error.context("several steps in a row failed"));
                }
            }
        }
        self.note_state();
        Ok(())
    }

    /// Computes one step, and says how many texts wait and run once it has admitted some.
    fn compute(&mut self) -> Result<Vec<Event>, EngineError> {
        if self.scheduler.begin_step()?.is_none() {
            return Ok(Vec::new());
        }
        self.queue.publish(self.scheduler.queued(), self.metrics);
        self.scheduler.forward(self.model)
    }

    /// Publishes the counts of the scheduler and its cache, and the failures of its tiers.
    fn note_state(&mut self) {
        self.queue.publish(self.scheduler.queued(), self.metrics);
        self.metrics.note_cache(self.scheduler.cache());
        publish::hand_on(self.publisher.as_ref(), &mut self.scheduler);
        let now = Instant::now();
        let is_due = self.watch.is_due(now);
        if let Some(tiers) = is_due.then(|| self.scheduler.tiers()).flatten() {
            for line in self.watch.look(&tiers, now) {
                // The note may have no reader; the texts go on.
                let _ = output::note(&line);
            }
        }
    }

    /// Passes an event on.
    fn deliver(&mut self, event: Event) {
        match event {
            Event::Token { index, token } => {
                let Some(listener) = self.listeners.get_mut(&index) else { return };
                if !std::mem::replace(&mut listener.has_started, true) {
                    self.metrics.note_first_token(listener.submitted.elapsed());
                    // A text that has ended already says it at its end.
                    let cached = self.scheduler.reused(index).unwrap_or(0);
                    listener.updates.send(Update::Started { cached });
                }
                self.metrics.note_token();
                if listener.ignore_eos || !self.options.eos.contains(&token) {
                    listener.updates.send(Update::Token(token));
                }
            }
            Event::Finished { index, generated } => {
                let Some(listener) = self.listeners.remove(&index) else { return };
                self.metrics.note_end(generated.finish);
                let (finish, tokens) = (generated.finish, generated.tokens.len());
                let cached = generated.reused;
                listener.updates.send(Update::Finished { finish, tokens, cached });
            }
            // An event of a later version tells a text nothing.
            _ => {}
        }
    }

    /// Cancels the texts that have ended, which are counted as `over` says.
    fn cancel_where(&mut self, over: impl Fn(&Listener) -> Option<Finish>) {
        let ended = self.listeners.iter().filter_map(|(index, listener)| {
            let finish = over(listener)?;
            Some((*index, finish))
        });
        for (index, finish) in ended.collect::<Vec<_>>() {
            self.listeners.remove(&index);
            if self.scheduler.cancel(index).is_some() {
                self.metrics.note_end(finish);
            }
        }
    }

    /// Ends one text with an error.
    fn fail(&mut self, index: usize, why: &str) {
        if let Some(listener) = self.listeners.remove(&index) {
            listener.updates.send(Update::Failed(why.to_owned()));
        }
        if self.scheduler.cancel(index).is_some() {
            self.metrics.note_end(Finish::Cancelled);
        }
    }

    fn fail_all(&mut self, why: &str) {
        for listener in self.listeners.values() {
            listener.updates.send(Update::Failed(why.to_owned()));
        }
        self.cancel_where(|_| Some(Finish::Cancelled));
    }

    fn finish(mut self) -> anyhow::Result<()> {
        let now = Instant::now();
        let deadline = now.checked_add(crate::tiers::FLUSH).unwrap_or(now);
        crate::tiers::note_left(self.scheduler.flush_tiers(deadline)?)?;
        if let Some(tiers) = self.scheduler.tiers() {
            crate::tiers::warn(self.watch.names(), &tiers)?;
        }
        leaks::check(self.scheduler.cache())
    }
}

#[cfg(test)]
mod tests {
    use super::super::metrics;
    use super::*;

    /// The engine takes no requests within a step: they must not pile up until its end.
    #[test]
    fn texts_have_room_in_the_queue_before_they_are_made() {
        let (metrics, _) = metrics::install("model").expect("the only recorder");
        let metrics = Arc::new(metrics);
        let (engine, inbox) = Engine::new(8, Arc::clone(&metrics));
        let refused = |texts| engine.reserve(texts).expect_err("refused");
        assert!(matches!(refused(9), Refused::TooManyTexts { texts: 9, max: 8 }));
        let place = engine.reserve(5).expect("room");
        let other = engine.reserve(3).expect("room");
        assert!(matches!(refused(1), Refused::QueueFull { waiting: 8, texts: 1, max: 8 }));
        drop(other);
        inbox.queue.publish((2, 0), &metrics);
        assert!(matches!(refused(2), Refused::QueueFull { waiting: 7, .. }));
        drop(place);
        drop(engine.reserve(6).expect("room"));
        engine.stop();
        assert!(matches!(refused(1), Refused::Stopping));
    }
}
