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

func TestServeAndReplaceStale(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "d.sock")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close() // as after a crash: the file stays, nobody answers

	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v; want 0600", fi.Mode(), err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".s*")); left != nil {
		t.Errorf("left behind: %v", left)
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
		t.Errorf("spoken %q", body)
	}
	if _, err := Listen(path); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second daemon got %v", err)
	}
	srv.Close()
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("socket is still there after Close: %v", err)
	}
}

// A folder as long as the refusal of a longer one says is taken.
func TestFoldersTooLong(t *testing.T) {
	base := t.TempDir()
	var most int
	for _, name := range []string{"d.sock", "a-longer-name.sock"} {
		long := filepath.Join(base, strings.Repeat("x", 100))
		_, err := Listen(filepath.Join(long, name))
		if err == nil {
			t.Fatalf("%s: a socket in %s", name, long)
		}
		_, limit, _ := strings.Cut(err.Error(), "--run-dir of at most ")
		if _, err := fmt.Sscan(limit, &most); err != nil || most < 80 {
			t.Fatalf("%s: %q, %v", name, limit, err)
		}
		fits := filepath.Join(base, strings.Repeat("x", most-len(base)-1))
		l, err := Listen(filepath.Join(fits, name))
		if err != nil {
			t.Fatalf("%s in %d bytes: %v", name, len(fits), err)
		}
		l.Close()
	}
}
