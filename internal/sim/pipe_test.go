package sim

import (
	"bytes"
	"errors"
	"io"
	"os"
	"testing"
	"time"
)

// TestPipe: what is written is read after a flush, as much as the window takes waits, and either side hears of the
// other's end.
func TestPipe(t *testing.T) {
	p := newPipe()
	sent, got := bytes.Repeat([]byte("0123456789"), window/3), new(bytes.Buffer)
	done := make(chan error)
	go func() {
		_, err := io.Copy(got, p)
		done <- err
	}()
	if n, err := p.Write(sent); n != len(sent) || err != nil {
		t.Fatalf("wrote %d of %d, %v", n, len(sent), err)
	}
	p.Flush()
	p.End()
	if err := <-done; err != nil || !bytes.Equal(got.Bytes(), sent) {
		t.Errorf("read %d bytes of %d, %v", got.Len(), len(sent), err)
	}
	if _, err := p.Write(sent); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("after its end a write says %v", err)
	}
}

func TestPipeDeadline(t *testing.T) {
	p := newPipe()
	p.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
	if n, err := p.Write(make([]byte, 2*window)); n != window || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("wrote %d, %v", n, err)
	}
	p.SetWriteDeadline(time.Time{})
	wrote := make(chan error)
	go func() {
		_, err := p.Write([]byte("more"))
		wrote <- err
	}()
	if _, err := io.ReadFull(p, make([]byte, window)); err != nil {
		t.Fatal(err)
	}
	if err := <-wrote; err != nil {
		t.Errorf("with room again: %v", err)
	}
	p.Close()
	if _, err := p.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("with nobody reading: %v", err)
	}
	if _, err := p.Read(make([]byte, 1)); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("a read after closing says %v", err)
	}
}
