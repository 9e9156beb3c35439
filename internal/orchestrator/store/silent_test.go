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

// A member that still takes what it is sent and says nothing costs a read time, and no more.
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
	for member.answered.Load() < 2 { // also what opens a connection is an answer
		if err := s.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	before := member.asked.Load()
	member.silent.Store(true)
	for range 3 {
		if _, _, err := s.Resolve(t.Context(), node(1), 1, "blue", web); err != nil {
			t.Errorf("a call that only reads: %v", err)
		}
	}
	if member.asked.Load() == before {
		t.Error("the silent member was not asked")
	}
}

// silentMember passes on what it is sent until it falls silent.
type silentMember struct {
	url             string
	silent          atomic.Bool
	asked, answered atomic.Int64 // how often something came
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
			go m.pass(far, near, &m.asked)
			go m.pass(near, far, &m.answered)
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
