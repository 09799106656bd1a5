//! `logs`: both streams of a task or run from their beginning.

use executor_proto::types::{ReadStreamEvent, StreamChunk, StreamName, TaskId};
use futures_util::{StreamExt, future::try_join};

use super::{
    Failure, Outcome,
    backend::Backend,
    output::{self, Viewed},
};
use crate::text::failure::Asked;

pub(super) async fn logs(backend: &Backend, id: &str, follow: bool) -> Outcome {
    let id = TaskId(id.to_owned());
    let [stdout, stderr] = StreamName::BOTH.map(|stream| one(backend, &id, stream, follow));
    try_join(stdout, stderr).await?;
    Ok(0)
}

async fn one(backend: &Backend, id: &TaskId, stream: StreamName, follow: bool) -> Result<(), Failure> {
    let asked = Asked { task: Some(id), ..Asked::default() };
    let failed = |error| backend.failure_of(&error, &asked);
    let mut events =
        backend.executor.read_stream(backend.owner.as_ref(), id, stream, 0, follow).await.map_err(failed)?;
    let mut view = Viewed::new(stream);
    let mut shown = 0;
    while let Some(event) = events.next().await {
        let reached = match event.map_err(failed)? {
            ReadStreamEvent::Chunk(StreamChunk { stream: _, offset, data }) => {
                let end = offset + data.len() as u64;
                gap(stream, shown, offset).await?;
                view.write(data).await?;
                end
            }
            ReadStreamEvent::End { total, closed: _ } => {
                gap(stream, shown, total).await?;
                total
            }
        };
        shown = reached;
    }
    view.finish().await
}

async fn gap(stream: StreamName, from: u64, to: u64) -> Result<(), Failure> {
    if to > from {
        output::line(&format!("bytes {from} to {to} of {} are no longer kept", stream.as_str())).await?;
    }
    Ok(())
}
