//! A cache in a server: request threads send tokens over a channel to the one thread that owns the
//! cache, which runs a step for all requests that wait. `KvCache` is `Send`, and steps borrow it.
//!
//! `cargo run --release -p kv --example from_threads -- cpu`
#![expect(
    clippy::print_stdout,
    clippy::as_conversions,
    clippy::arithmetic_side_effects,
    reason = "an example"
)]
#![expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "few tokens")]

use std::error::Error;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::{iter, slice, thread};

use kv::{AttentionOptions, CacheSpec, Device, KvCache, QkvFormat, SequenceId, StartOptions};
use kv::{StepInput, TensorView, TensorViewMut};

const TOKENS: usize = 8; // of every client

type BoxedError = Box<dyn Error + Send + Sync>;

/// The next token of a sequence, and where its output goes.
struct Request {
    seq: SequenceId,
    token: u32,
    reply: Sender<f32>,
}

/// Serves requests until no client is left. Returns the number of steps.
fn serve(cache: &mut KvCache, requests: &Receiver<Request>) -> Result<usize, kv::Error> {
    let mut steps = 0;
    while let Ok(first) = requests.recv() {
        let batch: Vec<_> = iter::once(first).chain(requests.try_iter()).collect();
        for Request { seq, token, .. } in &batch {
            if !cache.contains(*seq) {
                cache.start(*seq, &[*token], StartOptions::default())?;
            }
        }
        let input = |request| StepInput::tokens(request.seq, slice::from_ref(&request.token));
        let mut step = cache.begin_step(&batch.iter().map(input).collect::<Vec<_>>())?;
        let v: Vec<f32> = batch.iter().flat_map(|request| [request.token as f32; 4]).collect();
        let (zeros, mut out) = (vec![0.0_f32; v.len()], vec![0.0_f32; v.len()]);
        let dims = [batch.len() as u32, 1, 4];
        let zeros = TensorView::host(&zeros, &dims);
        step.write(0, zeros, TensorView::host(&v, &dims), QkvFormat::Thd)?;
        let to = TensorViewMut::host(&mut out, &dims);
        step.attend(0, zeros, to, &AttentionOptions::causal(0.5))?;
        step.commit()?;
        steps += 1;
        for (request, out) in batch.iter().zip(out.iter().step_by(4)) {
            let _ = request.reply.send(*out); // a client that has gone needs no reply
        }
    }
    Ok(steps)
}

/// Generates the tokens `begin..begin + TOKENS` in a sequence of its own.
fn client(begin: u32, server: &Sender<Request>) -> Result<SequenceId, BoxedError> {
    let seq = SequenceId(begin.into());
    for token in (begin..).take(TOKENS) {
        let (reply, output) = channel();
        server.send(Request { seq, token, reply })?;
        // The V of a token is its id: zero queries get the mean of this sequence, of no other.
        let (out, mean) = (output.recv()?, (begin as f32 + token as f32) / 2.0);
        assert!((out - mean).abs() < 1e-3, "{seq}, token {token}: {out} is not {mean}");
    }
    Ok(seq)
}

fn main() -> Result<(), BoxedError> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(16, 64).build()?;
    let mut cache = KvCache::new(Device::open(&device)?, spec)?;
    let (server, requests) = channel();
    let owner = thread::spawn(move || serve(&mut cache, &requests).map(|steps| (cache, steps)));
    let spawn = |begin| {
        thread::spawn({
            let server = server.clone();
            move || client(begin, &server)
        })
    };
    let clients = [0, 100, 200, 300].map(spawn);
    drop(server); // the owner returns when the last client has
    for client in clients {
        client.join().map_err(|_| "a client panicked")??;
    }
    let (cache, steps) = owner.join().map_err(|_| "the owner panicked")??;
    assert!((TOKENS..=4 * TOKENS).contains(&steps), "{steps} steps");
    assert_eq!(cache.usage().tokens, 4 * 8);
    println!("{device}: 4 threads, {} tokens in {steps} steps", cache.usage().tokens);
    Ok(())
}
