package sdnotify

import (
	"net"
	"path/filepath"
	"testing"
)

func TestNotify(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	if err := Notify(Ready); err != nil {
		t.Fatalf("without a supervisor: %v", err)
	}
	for _, name := range []string{filepath.Join(t.TempDir(), "notify"), "@pilaster-sdnotify-test"} {
		c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
		if err != nil {
			t.Fatal(err)
		}
		t.Setenv("NOTIFY_SOCKET", name)
		if err := Notify(Ready); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 64)
		n, err := c.Read(b)
		if err != nil || string(b[:n]) != "READY=1" {
			t.Errorf("%s: the supervisor received %q, %v; want READY=1", name, b[:n], err)
		}
		c.Close()
		if err := Notify(Ready); err == nil {
			t.Errorf("%s: got no error, though no process listens", name)
		}
	}
}
