package sim

import (
	"bytes"
	"errors"
	"io"
	"os"
	"testing"
	"time"
)

// TestPipe: the reader gets written bytes after a flush, a writer waits while the window is full, and each side notices
// when the other side ends the stream.
func TestPipe(t *testing.T) {
	p := newPipe()
	sent, got := bytes.Repeat([]byte("0123456789"), window/3), new(bytes.Buffer)
	done := make(chan error)
	go func() {
		_, err := io.Copy(got, p)
		done <- err
	}()
	if n, err := p.Write(sent); n != len(sent) || err != nil {
		t.Fatalf("wrote %d of %d bytes: %v", n, len(sent), err)
	}
	p.Flush()
	p.End()
	if err := <-done; err != nil || !bytes.Equal(got.Bytes(), sent) {
		t.Errorf("read %d of %d bytes: %v", got.Len(), len(sent), err)
	}
	if _, err := p.Write(sent); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("a write after End returned %v", err)
	}
}

func TestPipeDeadline(t *testing.T) {
	p := newPipe()
	p.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
	if n, err := p.Write(make([]byte, 2*window)); n != window || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("wrote %d bytes: %v", n, err)
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
		t.Errorf("a write after the window had room again: %v", err)
	}
	p.Close()
	if _, err := p.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("a write after the reader closed returned %v", err)
	}
	if _, err := p.Read(make([]byte, 1)); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("a read after Close returned %v", err)
	}
}
