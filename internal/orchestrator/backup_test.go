package orchestrator

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// startAndStop starts an orchestrator. stop stops it before the test ends.
func startAndStop(t *testing.T, c Config) (s *Server, stop func()) {
	t.Helper()
	s, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(s.Close)
	t.Cleanup(stop)
	return s, stop
}

func backup(t *testing.T, c Config) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "backup")
	if _, err := store.Backup(t.Context(), c.DataDir, file, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("backup file: got mode %v, %v; want 0600", fi.Mode(), err)
	}
	return file
}

// restored starts an orchestrator with a restored backup, in other folders than the original's.
func restored(t *testing.T, file string, skip uint64) *Server {
	t.Helper()
	return start(t, restoredConfig(t, file, skip))
}

func restoredConfig(t *testing.T, file string, skip uint64) Config {
	t.Helper()
	c := testConfig(t)
	if _, err := store.Restore(t.Context(), file, c.DataDir, skip, c.Log); err != nil {
		t.Fatal(err)
	}
	return c
}

// shownState returns all nodes and the tenants blue and red, as operators see them.
func shownState(t *testing.T, s *Server) (all []proto.Message) {
	t.Helper()
	op := operator(s.config.RunDir)
	nodes, err := op.ListNodes(t.Context(), connect.NewRequest(&pilasterv1.ListNodesRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	all = append(all, nodes.Msg)
	for _, name := range []string{"blue", "red"} {
		tenant, err := op.GetTenant(
			t.Context(),
			connect.NewRequest(&pilasterv1.GetTenantRequest{Name: name, ShowKey: true}),
		)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, tenant.Msg)
	}
	return all
}

// A restored orchestrator serves the same cluster, whether the backup was made while the original ran or after it had
// stopped.
func TestBackupAndRestore(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	s, stop := startAndStop(t, c)
	createTenant(t, s, "blue")
	createTenant(t, s, "red")
	n1 := registered(t, s, testNode(1))
	resolve(t, n1, "blue", "web")
	for i := range 45 { // 3 records each: more than fit in one transaction
		resolve(t, n1, "red", testNode(i).Name)
	}
	await(t, s, func() bool { return len(s.cache.Apps["red"]) == 45 && len(s.cache.Hosting) == 2 })
	want, cluster, token := shownState(t, s), s.store.Cluster(), s.Token()
	running := backup(t, c)
	n1.Close()
	stop()
	for _, m := range want { // Restore raises this counter above every value that nodes may have received
		if tenant, ok := m.(*pilasterv1.GetTenantResponse); ok {
			tenant.Tenant.Changes += store.DefaultSkip
		}
	}
	for name, file := range map[string]string{"running": running, "stopped": backup(t, c)} {
		s := restored(t, file, store.DefaultSkip)
		for i, got := range shownState(t, s) {
			if !proto.Equal(got, want[i]) {
				t.Errorf("%s: restored %v, want %v", name, got, want[i])
			}
		}
		if now := s.store.Cluster(); now.UUID != cluster.UUID || s.Token() != token || now.From == 0 {
			t.Errorf("%s: got cluster %s, token %s, from %d; want %s, %s, not 0",
				name, now.UUID, s.Token(), now.From, cluster.UUID, token)
		}
	}
	again := c
	if _, err := store.Restore(t.Context(), running, again.DataDir, 1, c.Log); err == nil {
		t.Error("a restore into a used data directory succeeded, want an error")
	}
	if s = start(t, again); s.store.Cluster().From != 0 {
		t.Error("a refused restore changed the data directory")
	}
}

func await(t *testing.T, s *Server, condition func() bool) {
	t.Helper()
	if err := s.cache.Await(t.Context(), condition); err != nil {
		t.Fatal(err)
	}
}

// newerState is a node's state that was allocated after the backup.
type newerState struct {
	config join.Config // its StateDir has the node's certificate
	prefix string
	tenant *pilasterv1.Tenant
	app    *pilasterv1.App
}

func (a newerState) register(t *testing.T, s *Server) error {
	t.Helper()
	a.config.URL = s.url()
	client, err := join.Dial(t.Context(), a.config)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	tenant := proto.CloneOf(a.tenant)
	for _, id := range tenant.Ids {
		id.Key = nil
	}
	resp, err := client.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
		Version: "test", WantedPrefix: a.prefix, ClusterUuid: s.store.Cluster().UUID,
		Held: &pilasterv1.Held{Tenants: []*pilasterv1.Tenant{tenant}, Apps: []*pilasterv1.App{a.app}},
	}))
	if err == nil && resp.Msg.Node.Prefix != a.prefix {
		t.Errorf("got prefix %s, want %s, which the node had before", resp.Msg.Node.Prefix, a.prefix)
	}
	return err
}

// allocateState registers a node and allocates a prefix, a tenant and an app for it.
func allocateState(t *testing.T, s *Server, n int) newerState {
	t.Helper()
	a := newerState{
		config: join.Config{
			URL:      s.url(),
			Token:    s.Token(),
			StateDir: t.TempDir(),
			NodeName: testNode(n).Name,
			NodeUUID: testNode(n).UUID,
			Log:      s.config.Log,
		},
	}
	client, err := join.Dial(t.Context(), a.config)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	resp, err := client.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test"}))
	if err != nil {
		t.Fatal(err)
	}
	a.prefix = resp.Msg.Node.Prefix
	a.tenant = createTenant(t, s, "late-"+testNode(n).Name)
	a.app = resolve(t, client, "blue", "late-"+testNode(n).Name)
	return a
}

// Two nodes registered after the backup. After the restore, one of them registers at once. Then other nodes receive
// prefixes, tenants and apps, and the second node registers last. With a margin, Restore skips the ids of both nodes,
// so that no id is allocated twice.
func TestRestoreOfAnOldBackup(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		skip  uint64
		twice bool
	}{"with a margin": {store.DefaultSkip, false}, "without a margin": {0, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, stop := startAndStop(t, testConfig(t))
			createTenant(t, s, "blue")
			registered(t, s, testNode(1)).Close()
			file := backup(t, s.config)
			present, absent := allocateState(t, s, 2), allocateState(t, s, 3)
			stop()

			s = restored(t, file, c.skip)
			if err := present.register(t, s); err != nil {
				t.Errorf("first node: %v", err)
			}
			var others []newerState
			for n := range 3 {
				others = append(others, allocateState(t, s, 10+n))
			}
			twice := false
			for _, o := range others {
				for _, a := range []newerState{present, absent} {
					twice = twice || o.prefix == a.prefix || o.tenant.Ids[0].Id == a.tenant.Ids[0].Id ||
						o.app.Id == a.app.Id
				}
			}
			if twice != c.twice {
				t.Errorf("a prefix or id was allocated twice: got %v, want %v", twice, c.twice)
			}
			if err := absent.register(t, s); (err != nil) != c.twice {
				t.Errorf("last node: got error %v, want one: %v", err, c.twice)
			}
		})
	}
}

// A node that resumes at a revision from before the restore receives a snapshot. It does so even if the restored store
// has passed that revision, because the changes up to this revision now differ.
func TestFollowAcrossARestore(t *testing.T) {
	t.Parallel()
	s, stop := startAndStop(t, testConfig(t))
	createTenant(t, s, "blue")
	n1 := registered(t, s, testNode(1))
	file := backup(t, s.config)
	before := follow(t, n1, hosting("blue")).next(t).Revision
	n1.Close()
	stop()

	for n := range 2 { // two restores of the same file have different histories, too
		s, stop := startAndStop(t, restoredConfig(t, file, 1))
		n1 = registered(t, s, testNode(1))
		for i := range 20 { // at least as many changes as before the restore
			resolve(t, n1, "blue", fmt.Sprint("made-", n, "-", i))
		}
		first := hosting("blue")
		first.ResumeRevision = before
		next := follow(t, n1, first).next(t)
		if next.GetSnapshot() == nil || next.Revision <= before || int64(float64(next.Revision)) != next.Revision {
			t.Errorf("after %d restores, resumed at revision %d: got %v, want a snapshot of a later revision",
				n+1, before, next)
		}
		before = next.Revision - 10
		n1.Close()
		stop()
	}
}

func TestBackupRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	if _, err := store.Backup(t.Context(), dir, filepath.Join(dir, "file"), log); err == nil {
		t.Error("a backup of an empty directory succeeded, want an error")
	}
	if err := os.WriteFile(filepath.Join(dir, "join-token"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := store.Backup(t.Context(), dir, filepath.Join(dir, "file"), log)
	wantText(t, err, "etcdctl snapshot save")
	_, err = store.Backup(t.Context(), dir, filepath.Join(dir, "join-token"), log)
	wantText(t, err, "exists already")
	if _, err := os.Stat(filepath.Join(dir, "file")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a refused backup left a file behind")
	}
}

func wantText(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("got error %v, want one with %q", err, text)
	}
}
