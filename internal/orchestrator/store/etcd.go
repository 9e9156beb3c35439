package store

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"pilaster.io/pilaster/internal/statefile"
)

// External is an etcd cluster outside this process.
type External struct {
	Endpoints []string // https://host:2379; http only if the network is trusted
	CA        string   // PEM file of its certificate authority; empty means the system's authorities
	Cert, Key string   // PEM files of the client certificate, if etcd requires one
}

// Dial returns a client. It does not wait for a connection.
func Dial(e External) (*clientv3.Client, error) {
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if e.CA != "" {
		pem, err := os.ReadFile(e.CA)
		if err != nil {
			return nil, err
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no certificate in PEM", e.CA)
		}
	}
	if e.Cert != "" || e.Key != "" {
		pair, err := tls.LoadX509KeyPair(e.Cert, e.Key)
		if err != nil {
			return nil, fmt.Errorf("certificate for etcd: %w", err)
		}
		t.Certificates = []tls.Certificate{pair}
	}
	for _, endpoint := range e.Endpoints {
		if u, err := url.Parse(endpoint); err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" {
			return nil, fmt.Errorf("etcd endpoint %q is not of the form https://host:2379", endpoint)
		}
	}
	return newClient(e.Endpoints, t)
}

// deadAfter is the keepalive timeout of a connection to an etcd member.
const deadAfter = 2 * time.Second

func newClient(endpoints []string, t *tls.Config) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{
		Endpoints:            endpoints,
		TLS:                  t,
		DialTimeout:          requestTimeout,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: deadAfter,
		Logger:               zap.NewNop(), // calls return errors
	})
}

// Embedded is a single-member etcd inside this process. Its client calls it directly. It also listens on a unix socket
// in its directory, for etcdctl and backups.
type Embedded struct {
	Client *clientv3.Client
	etcd   *embed.Etcd
	lock   *os.File
	quiet  atomic.Bool
}

func socketIn(dir string) string { return filepath.Join(dir, "etcd.sock") }

// maxSocketPath is the kernel's limit for the path of a unix socket.
const maxSocketPath = 107

// Embed starts etcd in <dir>/etcd, accessible only to the owner of the process. etcd syncs a write to disk before it
// acknowledges the write.
func Embed(ctx context.Context, dir string, log *slog.Logger) (*Embedded, error) {
	return embedWith(ctx, dir, 0, log)
}

// embedWith takes etcd's size limit in bytes; 0 means its default, 2 GiB.
func embedWith(ctx context.Context, dir string, quota int64, log *slog.Logger) (_ *Embedded, err error) {
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	e := new(Embedded)
	defer func() {
		if err != nil {
			e.Close()
		}
	}()
	if e.lock, err = statefile.Lock(dir); err != nil {
		return nil, err
	}
	socket := socketIn(dir)
	if len(socket) > maxSocketPath {
		return nil, fmt.Errorf(
			"%s is longer than the %d characters allowed for the path of a unix socket; choose a shorter --data-dir",
			socket,
			maxSocketPath,
		)
	}
	c := embed.NewConfig()
	c.Name = "pilaster"
	c.Dir = filepath.Join(dir, "etcd")
	c.InitialCluster = c.InitialClusterFromName(c.Name)
	c.ListenPeerUrls = nil // one member has no peers
	c.ListenClientUrls = []url.URL{{Scheme: "unix", Path: socket}}
	c.QuotaBackendBytes = quota
	c.MaxTxnOps = maxEmbeddedOps
	c.AutoCompactionMode, c.AutoCompactionRetention = embed.CompactorModePeriodic, "1h"
	c.TickMs, c.ElectionMs = 50, 250 // a single member needs no votes
	// etcd keeps the log entries since its last snapshot in memory, for lagging members, and reads all of them when it
	// starts. A single member needs few of them, and an entry may have a thousand changes. The same is true of old WAL
	// files.
	c.SnapshotCount, c.SnapshotCatchUpEntries, c.MaxWalFiles = 500, 1, 2
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(slogCore{log, &e.quiet}))
	if e.etcd, err = embed.StartEtcd(c); err != nil {
		return nil, fmt.Errorf("embedded etcd in %s: %w", c.Dir, err)
	}
	// The socket gives access to all keys of the cluster, and other users may have access to the directory.
	if err := os.Chmod(socket, 0o600); err != nil {
		return nil, err
	}
	select {
	case <-e.etcd.Server.ReadyNotify():
	case err := <-e.etcd.Err():
		return nil, fmt.Errorf("embedded etcd in %s: %w", c.Dir, err)
	case <-ctx.Done():
		return nil, fmt.Errorf("embedded etcd in %s did not become ready: %w", c.Dir, ctx.Err())
	}
	e.Client = v3client.New(e.etcd.Server)
	return e, e.makeRoom(ctx, log)
}

// makeRoom removes old revisions if etcd has reached its size limit, at which it accepts no writes.
func (e *Embedded) makeRoom(ctx context.Context, log *slog.Logger) error {
	alarms, err := e.Client.AlarmList(ctx)
	if err != nil {
		return unavailable(err)
	}
	for _, alarm := range alarms.Alarms {
		if alarm.Alarm != etcdserverpb.AlarmType_NOSPACE {
			continue
		}
		now, err := e.Client.Get(ctx, keyCluster, clientv3.WithKeysOnly())
		if err != nil {
			return unavailable(err)
		}
		_, err = e.Client.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical())
		if err != nil && !errors.Is(err, rpctypes.ErrCompacted) {
			return fmt.Errorf("make room in the embedded etcd: %w", err)
		}
		if err := e.etcd.Server.Backend().Defrag(); err != nil {
			return fmt.Errorf("make room in the embedded etcd: %w", err)
		}
		if _, err := e.Client.AlarmDisarm(ctx, (*clientv3.AlarmMember)(alarm)); err != nil {
			return fmt.Errorf("make room in the embedded etcd: %w", err)
		}
		log.Warn("the embedded etcd had reached its size limit; its old revisions were removed")
	}
	return nil
}

// Close stops etcd and waits for its end.
func (e *Embedded) Close() {
	e.quiet.Store(true)
	if e.Client != nil {
		e.Client.Close()
	}
	if e.etcd != nil {
		e.etcd.Close()
	}
	if e.lock != nil {
		e.lock.Close()
	}
}

// Failed receives an error if etcd stops by itself.
func (e *Embedded) Failed() <-chan error { return e.etcd.Err() }

// SplitEndpoints parses the value of --etcd.
func SplitEndpoints(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
}

// slogCore passes etcd's errors to our logger and drops its other messages.
type slogCore struct {
	log   *slog.Logger
	quiet *atomic.Bool // set by Close, because etcd logs errors when it stops
}

func (c slogCore) Enabled(l zapcore.Level) bool { return l >= zapcore.ErrorLevel && !c.quiet.Load() }

func (c slogCore) With(fields []zapcore.Field) zapcore.Core {
	return slogCore{c.log.With(attributes(fields)...), c.quiet}
}

func (c slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	level := slog.LevelWarn
	if e.Level > zapcore.ErrorLevel {
		level = slog.LevelError
		defer c.log.Error(
			"the embedded etcd failed, and this process ends; acknowledged changes are on disk: repair what etcd " +
				"reported, and restart",
		)
	}
	c.log.Log(context.Background(), level, "etcd: "+e.Message, attributes(fields)...)
	return nil
}

func (c slogCore) Sync() error { return nil }

func attributes(fields []zapcore.Field) []any {
	m := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(m)
	}
	var args []any
	for k, v := range m.Fields {
		args = append(args, k, v)
	}
	return args
}
