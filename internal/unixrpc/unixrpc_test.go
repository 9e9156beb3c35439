package unixrpc

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestListen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "d.sock")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close() // as after a crash: the file remains, and no process listens

	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("got mode %v, %v; want 0600", fi.Mode(), err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".s*")); left != nil {
		t.Errorf("got temporary folders %v, want none", left)
	}
	srv := Server(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Proto) }))
	go srv.Serve(l)
	resp, err := Client(path).Get(URL)
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if string(body) != "HTTP/2.0" {
		t.Errorf("got protocol %q, want HTTP/2.0", body)
	}
	if _, err := Listen(path); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second Listen: got error %v, want \"in use\"", err)
	}
	srv.Close()
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the socket exists after Close: %v", err)
	}
}

// A folder of the length that the error for a longer one names is accepted.
func TestPathTooLong(t *testing.T) {
	base := t.TempDir()
	var most int
	for _, name := range []string{"d.sock", "a-longer-name.sock"} {
		long := filepath.Join(base, strings.Repeat("x", 100))
		_, err := Listen(filepath.Join(long, name))
		if err == nil {
			t.Fatalf("%s: a socket was created in %s, want an error", name, long)
		}
		_, limit, _ := strings.Cut(err.Error(), "--run-dir of at most ")
		if _, failed := fmt.Sscan(limit, &most); failed != nil || most < 80 {
			t.Fatalf("%s: got error %v, want one with a limit of at least 80 bytes", name, err)
		}
		fits := filepath.Join(base, strings.Repeat("x", most-len(base)-1))
		l, err := Listen(filepath.Join(fits, name))
		if err != nil {
			t.Fatalf("%s in a folder of %d bytes: %v", name, len(fits), err)
		}
		l.Close()
	}
}
