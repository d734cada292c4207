//! `udm web`: a page that shows a running `udm serve`, in a process of its own.
//!
//! Contract: it listens on loopback only and accepts clients that know its token ([`access`]). It
//! serves the page ([`page`]) and relays all other requests to the control socket ([`relay`]):
//! reads, and with `--write` changes. A browser may do what any client of the control socket may
//! do. The server has no port, and a slow page affects no core. It speaks plain HTTP; from another
//! machine it is reached through `ssh -L`.

mod access;
mod page;
mod relay;

use crate::args::ServerArgs;
use crate::output::print_to_stdout;
use access::WebAccessRules;
use anyhow::{Context, Result, ensure};
use clap::Args;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use relay::ControlSocketProxy;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use udm_control::http::connections::{BusyConnectionGuard, ControlConnectionSlot, EvictingConnectionLimit};

/// Maximum number of open browser connections; a further one replaces an idle one.
const CONNECTIONS_MAX: usize = 64;

/// Maximum time for the head of a request; an idle connection is closed after it.
const HEAD_TIME_MAX: Duration = Duration::from_secs(15);

/// Pause before the next `accept` if the system has no file descriptor or memory for it.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The arguments of `udm web`.
#[derive(Debug, Args)]
pub struct WebArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    /// The address to listen on: a loopback address, and a port or 0 for a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Let the page change devices: suspend and resume them, fail and reinstate paths
    #[arg(long)]
    pub write: bool,
}

/// Runs until SIGINT or SIGTERM.
pub fn run(args: &WebArgs) -> Result<()> {
    ensure!(
        args.listen.ip().is_loopback(),
        "{}: udm web speaks plain HTTP and listens on loopback only: reach it through ssh -L",
        args.listen
    );
    let client = args.server.client()?;
    // Fails now if the server cannot be reached, instead of showing an empty page.
    client.call(udm_control::api::verbs::GET_VERSION, &())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let listener = TcpListener::bind(args.listen).await.with_context(|| args.listen.to_string())?;
        let check = WebAccessRules::new(args.write);
        print_to_stdout(&format!("http://{}/#token={}\n", listener.local_addr()?, check.token()))?;
        let state = Arc::new(WebState { check, relay: ControlSocketProxy::new(client.path()) });
        tokio::select! {
            () = accept_web_connections(&listener, &state) => {}
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        Ok(())
    })
}

/// The state that all connections share.
struct WebState {
    check: WebAccessRules,
    relay: ControlSocketProxy,
}

async fn accept_web_connections(listener: &TcpListener, state: &Arc<WebState>) {
    let connections = EvictingConnectionLimit::new(CONNECTIONS_MAX);
    for number in 0.. {
        connections.wait_for_slot().await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let (state, slot) = (Arc::clone(state), connections.open_slot(number, 0));
                tokio::spawn(async move {
                    tokio::select! {
                        () = serve_web_connection(stream, state, Arc::clone(&slot)) => {}
                        () = slot.evicted() => {}
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "udm web: accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve_web_connection(stream: TcpStream, state: Arc<WebState>, slot: Arc<ControlConnectionSlot>) {
    let service = service_fn(move |request| {
        let (state, slot) = (Arc::clone(&state), Arc::clone(&slot));
        async move {
            let page = page::web_asset_response(request.uri().path(), state.check.write());
            let answer = match state.check.reject(&request, page.is_some()).or(page) {
                Some(answer) => answer,
                None => {
                    let _busy: BusyConnectionGuard = slot.begin_request();
                    state.relay.pass(request, &slot).await
                }
            };
            Ok::<_, Infallible>(access::add_security_headers(answer))
        }
    });
    let mut server = hyper::server::conn::http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME_MAX);
    if let Err(error) = server.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!(%error, "udm web: connection");
    }
}
