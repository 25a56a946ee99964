//! A cache in a server: request threads send tokens over a channel to the one thread that owns the
//! cache, which runs a step for all requests that wait. `KvCache` is `Send`, and steps borrow it.
//!
//! `cargo run --release -p kv --example from_threads -- cpu`
#![expect(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::{iter, thread};

use kv::{AttentionOptions, Axes, CacheSpec, Device, KvCache, SequenceId, StartOptions};
use kv::{StepInput, TensorView, TensorViewMut};

type BoxedError = Box<dyn Error + Send + Sync>;

/// The next token of a sequence: its V, and the channel for its output.
struct Request {
    seq: SequenceId,
    v: f32,
    reply: Sender<f32>,
}

/// Serves requests until the last client has disconnected.
fn serve(mut cache: KvCache, requests: &Receiver<Request>) -> Result<KvCache, BoxedError> {
    while let Ok(first) = requests.recv() {
        let batch: Vec<_> = iter::once(first).chain(requests.try_iter()).collect();
        for request in &batch {
            if !cache.state().contains(request.seq) {
                cache.start(request.seq, &[], StartOptions::default())?;
            }
        }
        // Tokens without ids work too; prompts need ids to be reused.
        let inputs: Vec<_> = batch.iter().map(|r| StepInput::count(r.seq, 1)).collect();
        let v: Vec<f32> = batch.iter().flat_map(|request| [request.v; 4]).collect();
        let (zeros, mut out) = (vec![0.0_f32; v.len()], vec![0.0_f32; v.len()]);
        let dims = [u32::try_from(batch.len())?, 1, 4];
        let zeros = TensorView::host(&zeros, &dims);
        let mut step = cache.begin_step(&inputs)?;
        step.write(0, zeros, TensorView::host(&v, &dims), Axes::Thd)?;
        let to = TensorViewMut::host(&mut out, &dims);
        step.attend(0, zeros, to, &AttentionOptions::causal(0.5))?;
        step.commit()?;
        for (request, out) in batch.iter().zip(out.iter().step_by(4)) {
            let _ = request.reply.send(*out); // a disconnected client needs no reply
        }
    }
    Ok(cache)
}

/// Generates 8 tokens in its own sequence.
fn client(id: u8, server: &Sender<Request>) -> Result<(), BoxedError> {
    for token in 0..8_u8 {
        let ((reply, output), begin) = (channel(), f32::from(id) * 100.0);
        server.send(Request { seq: SequenceId(id.into()), v: begin + f32::from(token), reply })?;
        // Zero queries: the mean of this sequence's V, independent of the others.
        let (out, mean) = (output.recv()?, begin + f32::from(token) / 2.0);
        assert!((out - mean).abs() < 1e-3, "{id}, token {token}: {out} is not {mean}");
    }
    Ok(())
}

fn main() -> Result<(), BoxedError> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(16, 64).build()?;
    let cache = KvCache::new(Device::open(&device)?, spec)?;
    let (server, requests) = channel();
    let owner = thread::spawn(move || serve(cache, &requests));
    let servers = [0, 1, 2, 3].map(|id| (id, server.clone()));
    let clients = servers.map(|(id, server)| thread::spawn(move || client(id, &server)));
    drop(server); // the owner returns after the last client
    let cache = owner.join().map_err(|_| "the owner panicked")??;
    for client in clients {
        client.join().map_err(|_| "a client panicked")??;
    }
    assert_eq!((cache.state().num_sequences(), cache.state().usage().tokens), (4, 4 * 8));
    println!("{device}: 4 threads, {} tokens in one cache", cache.state().usage().tokens);
    Ok(())
}
