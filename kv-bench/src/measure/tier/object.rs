//! A store in S3 beside the crate that it is made with.
use std::sync::Arc;

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use kv::tier::object::ObjectStore;
use kv::tier::{BlockStore, ChunkAddress};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStoreExt as _};
use url::Url;

use super::error::TierError;
use super::pass::{Comparison, Passes, expect_chunk, soon, timed};
use super::report::TierLine;
use crate::chunks::{Chunks, on_threads, shuffled};
use crate::measure::Progress;
use crate::num::{to_u64, to_usize};

/// Measures the bucket with eight requests at once.
pub(super) fn measure(
    url: &str,
    rounds: u32,
    chunks: &Chunks,
    progress: &mut dyn Progress,
) -> Result<Vec<TierLine>, TierError> {
    // First, because it checks the URL and installs TLS.
    let store = ObjectStore::from_url(url).map_err(TierError::other)?;
    let (plain, prefix) = plain(url)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(TierError::io("start of a runtime"))?;
    let count = chunks.count_of_store();
    let mut buffers = chunks.buffers(AT_ONCE);
    let order: Vec<_> = (0..count).collect();
    let written = on_threads(&mut buffers, &order, |buffer, item| {
        chunks.complete(item, buffer)?;
        store.put(&chunks.address(item)?, buffer.bytes(), soon())?;
        Ok(())
    });
    let mut measure = || -> Result<Vec<TierLine>, TierError> {
        let [mut ours, mut theirs] = <[Passes; 2]>::default();
        for round in 0..=rounds {
            let order = shuffled(count, u64::from(round) + 1);
            let pass = timed(|| {
                let gets = order.iter().map(|item| {
                    let path = chunks.address(*item).map(|chunk| path(&prefix, &chunk));
                    let plain = Arc::clone(&plain);
                    async move {
                        let object = plain.get(&path?).await.map_err(TierError::other)?;
                        let bytes = object.bytes().await.map_err(TierError::other)?;
                        let bytes = to_u64(bytes.len());
                        if bytes == chunks.chunk_bytes() {
                            return Ok(());
                        }
                        Err(TierError::other(format!("an object of {bytes} bytes")))
                    }
                });
                let gets: Vec<_> = gets.map(Box::pin).collect();
                let all = stream::iter(gets).buffer_unordered(to_usize(AT_ONCE));
                runtime.block_on(all.try_for_each(|()| async { Ok(()) }))
            })?;
            theirs.push(round, pass, progress);
            let pass = timed(|| {
                on_threads(&mut buffers, &order, |buffer, item| {
                    let into = buffer.bytes_mut();
                    let read = store.get(&chunks.address(item)?, into, soon());
                    expect_chunk(read, into.len())
                })
            })?;
            ours.push(round, pass, progress);
        }
        let bytes = chunks.chunk_bytes() * to_u64(count);
        let (case, peer) = ("get from S3, 8 at once", "object_store alone");
        let line = Comparison { case, peer, goal: 0.9, threads: AT_ONCE, bytes };
        Ok(vec![line.line(&ours, &theirs)])
    };
    let lines = written.and_then(|()| measure());
    // Also after a failure.
    let removed = store.remove(&chunks.addresses(count), soon());
    let lines = lines?;
    removed?;
    Ok(lines)
}

/// Makes the crate's own client, with its own settings, and the prefix of the URL.
fn plain(url: &str) -> Result<(Arc<AmazonS3>, Path), TierError> {
    let url = Url::parse(url).map_err(TierError::other)?;
    let mut builder = AmazonS3Builder::from_env();
    builder = builder.with_bucket_name(url.host_str().unwrap_or_default());
    for (name, value) in url.query_pairs() {
        builder = match &*name {
            "endpoint" => builder.with_endpoint(value),
            "region" => builder.with_region(value),
            _ => {
                let options = ClientOptions::new().with_allow_http(value == "true");
                builder.with_client_options(options)
            }
        };
    }
    let client = builder.build().map_err(TierError::other)?;
    let prefix = Path::from_url_path(url.path()).map_err(TierError::other)?;
    Ok((Arc::new(client), prefix))
}

fn path(prefix: &Path, chunk: &ChunkAddress) -> Path {
    let (root, name) = (chunk.root.to_string(), chunk.name.to_string());
    let parts = ["v1", root.get(..16).unwrap_or_default(), &name];
    parts.into_iter().fold(prefix.clone(), Path::join)
}

const AT_ONCE: u32 = 8;
