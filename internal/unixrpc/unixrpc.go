// Package unixrpc is the unix sockets on which Pilaster's daemons serve the machine they run on:
// who may connect, and an HTTP client for them.
package unixrpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// URL is the base URL for clients made by Client; the host in it means nothing.
const URL = "http://pilaster.local"

// maxPath in bytes is what the kernel takes for a socket (unix(7)).
const maxPath = 107

// Listen serves path for its owner only. A socket without a server is replaced; one that
// another process serves is left alone and reported. Closing the listener removes the socket.
func Listen(path string) (net.Listener, error) {
	dir := filepath.Dir(path)
	if most := maxPath - max(len("/.s4294967295/s"), len(path)-len(dir)); len(dir) > most {
		return nil, fmt.Errorf(
			"%s cannot be a socket: its path has room for a --run-dir of at most %d bytes",
			path,
			most,
		)
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close()
		return nil, fmt.Errorf("%s is in use by a running daemon; stop it, or choose another --run-dir", path)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	// Made in a private folder and moved into place with its final mode: at no moment can
	// another user connect, and at no moment is the path without a socket.
	private, err := os.MkdirTemp(dir, ".s")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(private)
	made := filepath.Join(private, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: made, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false) // it would unlink the temporary name
	if err := errors.Join(os.Chmod(made, 0o600), os.Rename(made, path)); err != nil {
		l.Close()
		return nil, err
	}
	return &listener{l, path}, nil
}

type listener struct {
	net.Listener
	path string
}

func (l *listener) Close() error {
	os.Remove(l.path)
	return l.Listener.Close()
}

// ErrSilent is that a socket is not there, or nobody takes connections on it.
var ErrSilent = errors.New("nobody answers")

// Client speaks HTTP/2 without TLS, so that also streams in both directions work.
func Client(path string) *http.Client {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	return &http.Client{Transport: &http.Transport{
		Protocols: &p,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			d := net.Dialer{Timeout: 5 * time.Second}
			c, err := d.DialContext(ctx, "unix", path)
			if err != nil {
				return nil, fmt.Errorf("%w on %s (%w)", ErrSilent, path, errors.Unwrap(err))
			}
			return c, nil
		},
	}}
}

// Server serves HTTP/1 and HTTP/2 without TLS, for a listener of Listen.
func Server(h http.Handler) *http.Server {
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return &http.Server{Handler: h, Protocols: &p, ReadHeaderTimeout: 5 * time.Second}
}
