// Package unixrpc has servers and clients for HTTP on unix sockets, on which Pilaster's daemons serve commands and
// runtimes of their machine. Only the owner of a socket may connect.
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

// URL is the base URL for clients made by Client, which ignore the host in it.
const URL = "http://pilaster.local"

// maxPath is the kernel's limit for the path of a socket, in bytes (unix(7)).
const maxPath = 107

// Listen creates a socket with mode 0600. It replaces a socket on which no process listens; if a process does, it
// returns an error. Closing the listener removes the socket.
func Listen(path string) (net.Listener, error) {
	dir := filepath.Dir(path)
	if most := maxPath - max(len("/.s4294967295/s"), len(path)-len(dir)); len(dir) > most {
		return nil, fmt.Errorf(
			"%s is too long for a socket; nothing was changed: choose a --run-dir of at most %d bytes",
			path,
			most,
		)
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close()
		return nil, fmt.Errorf("%s is in use by a running daemon; stop it, or choose another --run-dir or --socket",
			path)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	// The socket is created in a private folder, gets its mode there, and is then renamed: other users can never
	// connect, and the path always has a socket.
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
	l.SetUnlinkOnClose(false) // it would remove the temporary path
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

// ErrNoListener means that a socket does not exist, or that no process accepts connections on it.
var ErrNoListener = errors.New("no daemon listens")

// Client returns a client that uses HTTP/2 without TLS, which bidirectional streams need.
func Client(path string) *http.Client {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	return &http.Client{Transport: &http.Transport{
		Protocols: &p,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			d := net.Dialer{Timeout: 5 * time.Second}
			c, err := d.DialContext(ctx, "unix", path)
			if err != nil {
				return nil, fmt.Errorf("%w on %s (%w)", ErrNoListener, path, errors.Unwrap(err))
			}
			return c, nil
		},
	}}
}

// Server returns a server for HTTP/1 and HTTP/2 without TLS, to use with Listen.
func Server(h http.Handler) *http.Server {
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return &http.Server{Handler: h, Protocols: &p, ReadHeaderTimeout: 5 * time.Second}
}
