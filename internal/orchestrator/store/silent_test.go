package store_test

import (
	"fmt"
	"io"
	"net"
	"net/url"
	"sync/atomic"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
)

// A read through an etcd member that accepts requests but does not answer takes longer, but does not fail.
func TestSilentMember(t *testing.T) {
	etcd := storetest.Debian(t)
	member := relay(t, etcd.Endpoints[0])
	etcd.Endpoints = append(etcd.Endpoints, member.url)
	client, err := store.Dial(etcd)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	s := open(t, client, address.Plan{})
	if _, err := s.CreateTenant(t.Context(), "blue", 0); err != nil {
		t.Fatal(err)
	}
	register(t, s, 1)
	web := map[string]string{"app": "web"}
	if _, _, err := s.Resolve(t.Context(), node(1), 1, "blue", web); err != nil {
		t.Fatal(err)
	}
	for member.received.Load() < 2 { // the first bytes are those of the TLS handshake
		if err := s.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	before := member.sent.Load()
	member.silent.Store(true)
	for range 3 {
		if _, _, err := s.Resolve(t.Context(), node(1), 1, "blue", web); err != nil {
			t.Errorf("a call that only reads: %v", err)
		}
	}
	if member.sent.Load() == before {
		t.Error("the client sent nothing to the silent member, so the test checked nothing")
	}
}

// silentMember relays a connection to an etcd member until the test sets silent. Then it drops all bytes.
type silentMember struct {
	url            string
	silent         atomic.Bool
	sent, received atomic.Int64 // reads of bytes that the client sent, and of bytes for the client
}

func relay(t *testing.T, endpoint string) *silentMember {
	t.Helper()
	to, err := url.Parse(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	m := &silentMember{url: fmt.Sprint("https://", l.Addr())}
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to.Host)
			if err != nil {
				near.Close()
				continue
			}
			go m.pass(far, near, &m.sent)
			go m.pass(near, far, &m.received)
		}
	}()
	return m
}

func (m *silentMember) pass(to io.WriteCloser, from io.Reader, count *atomic.Int64) {
	defer to.Close()
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		count.Add(1)
		if m.silent.Load() {
			continue
		}
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}
