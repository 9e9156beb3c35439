// Package storetest starts etcd servers for tests: the embedded one, and that of Debian as an external cluster.
package storetest

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// Each runs a test on both kinds of etcd.
func Each(t *testing.T, test func(t *testing.T, etcd *clientv3.Client)) {
	t.Run("embedded", func(t *testing.T) { test(t, Embedded(t)) })
	t.Run("debian", func(t *testing.T) {
		client, err := store.Dial(Debian(t))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { client.Close() })
		test(t, client)
	})
}

// Embedded starts an embedded etcd, which runs until the end of the test.
func Embedded(t *testing.T) *clientv3.Client {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	e, err := store.Embed(ctx, t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e.Client
}

// Debian starts /usr/bin/etcd on the loopback device. The server requires client certificates.
func Debian(t *testing.T) store.External {
	t.Helper()
	dir := t.TempDir()
	external := certify(t, dir)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	for {
		client, peer := freeAddress(t), freeAddress(t)
		exited := startDebian(t, external, dir, client, peer, log)
		external.Endpoints = []string{"https://" + client}
		if answered(t, external, exited, log.Name()) {
			return external
		}
	}
}

// startDebian starts the process. It returns a channel that is closed when the process has ended.
func startDebian(t *testing.T, external store.External, dir, client, peer string, log *os.File) <-chan struct{} {
	t.Helper()
	cmd := exec.Command(
		"/usr/bin/etcd",
		"--name",
		"test",
		"--data-dir",
		filepath.Join(dir, "data"),
		"--listen-client-urls",
		"https://"+client,
		"--advertise-client-urls",
		"https://"+client,
		"--listen-peer-urls",
		"http://"+peer,
		"--initial-advertise-peer-urls",
		"http://"+peer,
		"--initial-cluster",
		"test=http://"+peer,
		"--cert-file",
		filepath.Join(dir, "server.pem"),
		"--key-file",
		filepath.Join(dir, "server.key"),
		"--client-cert-auth",
		"--trusted-ca-file",
		external.CA,
	)
	if err := log.Truncate(0); err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		cmd.Wait()
		close(exited)
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-exited
	})
	return exited
}

// answered waits until etcd answers. It returns false if another process took one of the ports first: etcd then exits,
// and its log has the reason.
func answered(t *testing.T, e store.External, exited <-chan struct{}, log string) bool {
	t.Helper()
	client, err := store.Dial(e)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	go func() {
		select {
		case <-exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	_, err = client.Get(ctx, "/")
	if err == nil {
		return true
	}
	text, _ := os.ReadFile(log)
	if bytes.Contains(text, []byte("address already in use")) {
		return false
	}
	t.Fatalf("etcd does not answer: %v\n%s", err, text)
	return false
}

// freeAddress returns an address that was free a moment ago. Its port is outside the ephemeral range, because
// concurrent tests use thousands of those ports.
func freeAddress(t *testing.T) string {
	for range 1000 {
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", 10000+mathrand.IntN(20000)))
		if err == nil {
			defer l.Close()
			return l.Addr().String()
		}
	}
	t.Fatal("no port between 10000 and 30000 is free")
	return ""
}

// certify creates a certificate authority, and certificates for the server and its client.
func certify(t *testing.T, dir string) store.External {
	t.Helper()
	e := store.External{
		CA:   filepath.Join(dir, "ca.pem"),
		Cert: filepath.Join(dir, "client.pem"),
		Key:  filepath.Join(dir, "client.key"),
	}
	now := time.Now()
	authority, err := pki.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, e.CA, "CERTIFICATE", authority.Certificate())

	server, err := authority.Server([]string{"127.0.0.1"}, now)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, filepath.Join(dir, "server.pem"), "CERTIFICATE", server.Certificate[0])
	writeKey(t, filepath.Join(dir, "server.key"), server.PrivateKey)

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := authority.SignNode(csr, pki.Node{Name: "orchestrator", UUID: UUID(0)}, now)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, e.Cert, "CERTIFICATE", cert)
	writeKey(t, e.Key, key)
	return e
}

func writeKey(t *testing.T, path string, key any) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, path, "PRIVATE KEY", der)
}

func writePEM(t *testing.T, path, kind string, der []byte) {
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// UUID returns a distinct UUID for each number.
func UUID(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012x", n) }
