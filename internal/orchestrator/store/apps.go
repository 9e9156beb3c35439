package store

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// A tenant has at most 65,279 apps, and new label sets appear as long as the tenant exists. So the orchestrator retires
// unused apps and reuses their ids:
//
//   - When three quarters of a tenant's ids are used, a round begins. It lists some apps, and each node that hosts
//     the tenant reports which of them its containers use. From then on the node calls Resolve before it creates a
//     container of another listed app. Resolve removes that app from the round.
//
//   - When all nodes have reported, the next round lists the unused apps, and the nodes delete them from their
//     memory. When all nodes have confirmed that, these apps end.
//
//   - The id of an ended app is quarantined, because packets and lagging orchestrators may still use it for the
//     old labels.
//
// A round waits for disconnected nodes: no app ends until they reconnect or are deleted. A round waits in the same way
// for agents of builds without rounds.

// MaxApps is the limit of apps per tenant.
const MaxApps = int(address.FirstReservedApp) - 1

// MaxRound is the number of apps per round.
const MaxRound = 512

// LimitApps lowers the limit of apps per tenant. Call it before any other method.
func (s *Store) LimitApps(most int) { s.appLimit = most }

// MaxApps is the configured limit of apps per tenant.
func (s *Store) MaxApps() int { return s.appLimit }

// NearAppLimit reports whether a tenant with this number of apps should retire some.
func (s *Store) NearAppLimit(apps int) bool { return apps >= s.appLimit-s.appLimit/4 }

// BeginAppRound begins a round for a tenant near its limit, unless one is in progress.
func (s *Store) BeginAppRound(ctx context.Context, name string) error {
	return s.change(ctx, func(t *txn) error {
		of := new(pilasterv1.Tenant)
		if exists, err := t.load(dirTenants+name, of); err != nil || !exists || of.RetiringApps != nil {
			return err
		}
		taken, err := t.numbers(dirAppIDs + name + "/")
		if err != nil || !s.NearAppLimit(len(taken)) {
			return err
		}
		next, err := t.mark(dirRoundMarks + name)
		if err != nil {
			return err
		}
		all := slices.Sorted(maps.Keys(taken))
		i, _ := slices.BinarySearch(all, uint32(next))
		some := slices.Concat(all[i:], all[:i])
		some = some[:min(len(some), MaxRound)]
		t.setMark(dirRoundMarks+name, uint64(some[len(some)-1])+1)
		of.RetiringApps = &pilasterv1.RetiringApps{Round: newRound(), Apps: some}
		return t.saveChanged(of)
	})
}

// newRound returns a random number, so that no report from before a restore matches the round.
func newRound() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.NativeEndian.Uint64(b[:])
}

// AppsDue reports whether all nodes that host the tenant have confirmed its round.
func AppsDue(of *pilasterv1.Tenant, hosting []*pilasterv1.Hosting) bool {
	return of.RetiringApps != nil && len(Unanswered(of, hosting)) == 0
}

// Unanswered returns the nodes that have not confirmed a tenant's round.
func Unanswered(of *pilasterv1.Tenant, hosting []*pilasterv1.Hosting) []string {
	round := of.GetRetiringApps().GetRound()
	return nodesWhere(hosting, func(h *pilasterv1.Hosting) bool { return h.HeardRound != round })
}

// reconcileApps performs the due step of a tenant's round. If it returns more, the step needs further transactions, and
// the caller must not save the tenant's record yet.
func (s *Store) reconcileApps(t *txn, of *pilasterv1.Tenant, hosting []*pilasterv1.Hosting) (more bool, err error) {
	kept := map[uint32]bool{}
	for _, h := range hosting {
		for _, app := range h.KeepsApps {
			kept[app] = true
		}
	}
	round := of.RetiringApps
	of.RetiringApps = nil
	if round.Forgotten {
		return s.endApps(t, of.Name, round.Apps, kept)
	}
	unused := slices.DeleteFunc(slices.Clone(round.Apps), func(app uint32) bool { return kept[app] })
	if len(unused) > 0 {
		of.RetiringApps = &pilasterv1.RetiringApps{Round: newRound(), Apps: unused, Forgotten: true}
	}
	return false, nil
}

// endApps ends as many apps as fit into one transaction. It never splits an app and its id. The tenant's record, which
// the commit compares, proves that no Resolve took one of the apps out of the round.
func (s *Store) endApps(t *txn, name string, apps []uint32, kept map[uint32]bool) (more bool, err error) {
	var claims []string
	for _, app := range apps {
		claims = append(claims, appIDKey(name, app))
	}
	if err := t.fetch(claims...); err != nil {
		return false, err
	}
	t.indivisible = true
	for i, app := range apps {
		hash := t.readings[claims[i]].value
		switch w := t.weight(); {
		case hash == "": // an earlier transaction ended it
			continue
		case w.writes+8 > s.committer.maxBatch:
			return true, nil
		}
		record := dirApps + name + "/" + hash
		if kept[app] { // a node got the app from an orchestrator of an earlier build: send it to all nodes again
			if err := t.repeat(record); err != nil {
				return false, err
			}
			continue
		}
		if err := s.quarantine(t, appQuarantineKey(name, app), hash); err != nil {
			return false, err
		}
		t.delete(record)
		t.delete(claims[i])
	}
	return false, nil
}

// keepApp removes an app that a node is about to use from its tenant's round.
func (t *txn) keepApp(of *pilasterv1.Tenant, app *pilasterv1.App, hash string) error {
	round := of.RetiringApps
	i := slices.Index(round.GetApps(), app.Id)
	if i < 0 {
		return nil
	}
	if round.Forgotten {
		// Some nodes have deleted the app: send it to all nodes again.
		if err := t.repeat(dirApps + of.Name + "/" + hash); err != nil {
			return err
		}
	}
	if round.Apps = slices.Delete(round.Apps, i, i+1); len(round.Apps) == 0 {
		of.RetiringApps = nil
	}
	return t.saveChanged(of)
}

// repeat writes an unchanged value, so that all watches receive it again.
func (t *txn) repeat(key string) error {
	value, err := t.get(key)
	if err == nil && value != "" {
		t.put(key, value)
	}
	return err
}

// appsAhead is the number of ids that freeApp checks before it reads all ids. Usually one of the next ids is free.
const appsAhead = 8

// freeApp finds an id that is neither used nor quarantined: the next one above the mark, with wrap-around.
func (s *Store) freeApp(t *txn, of *pilasterv1.Tenant) (uint32, error) {
	mark, err := t.mark(dirAppMarks + of.Name)
	if err != nil {
		return 0, err
	}
	count := uint64(s.appLimit)
	number := func(i uint64) uint32 { return uint32((mark-1+i)%count) + 1 }
	var keys []string
	for i := range min(appsAhead, count) {
		keys = append(keys, appIDKey(of.Name, number(i)), appQuarantineKey(of.Name, number(i)))
	}
	if err := t.fetch(keys...); err != nil {
		return 0, err
	}
	for i := range min(appsAhead, count) {
		if free, err := t.isFree(of, number(i)); err != nil || free {
			return number(i), err
		}
	}
	return s.searchApp(t, of, number)
}

// isFree reports whether an id is free. The commit fails if the id is no longer free then.
func (t *txn) isFree(of *pilasterv1.Tenant, app uint32) (bool, error) {
	for _, key := range []string{appIDKey(of.Name, app), appQuarantineKey(of.Name, app)} {
		if value, err := t.get(key); err != nil || value != "" {
			return false, err
		}
	}
	// An app of the current round may have ended already, in one of several transactions.
	return !slices.Contains(of.GetRetiringApps().GetApps(), app), nil
}

func (s *Store) searchApp(t *txn, of *pilasterv1.Tenant, number func(uint64) uint32) (uint32, error) {
	taken, err := t.numbers(dirAppIDs + of.Name + "/")
	if err != nil {
		return 0, err
	}
	quarantined, err := t.numbers(dirAppQuarantine + of.Name + "/")
	if err != nil {
		return 0, err
	}
	for i := range uint64(s.appLimit) {
		if app := number(i); !taken[app] && !quarantined[app] {
			if free, err := t.isFree(of, app); err != nil || free {
				return app, err
			}
		}
	}
	advice := ""
	if of.RetiringApps != nil {
		hosting, err := t.hostingOf(of.Name)
		if err != nil {
			return 0, err
		}
		if late := Unanswered(of, hosting); len(late) > 0 {
			advice = fmt.Sprintf(
				" (wait for disconnected nodes or delete them: %s)",
				strings.Join(late[:min(len(late), 5)], ", "),
			)
		}
	}
	return 0, refuse(
		Full,
		"all %d apps of tenant %s are in use or in quarantine, one for each set of identity labels; nothing was "+
			"changed: "+
			"remove containers, or use fewer different sets of labels, and try again in %d minutes%s, or use another "+
			"tenant; `pilaster tenant get %s` shows them",
		s.appLimit,
		of.Name,
		quarantineTTL/60+1,
		advice,
		of.Name,
	)
}

// numbers returns the ids below a directory.
func (t *txn) numbers(dir string) (map[uint32]bool, error) {
	resp, err := t.read(dir, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, err
	}
	all := make(map[uint32]bool, len(resp.Kvs))
	for _, kv := range resp.Kvs {
		app, err := parseApp(string(kv.Key), dir)
		if err != nil {
			return nil, err
		}
		all[app.Id] = true
	}
	return all, nil
}

// parseApp returns the tenant and id of a key.
func parseApp(key, dir string) (*pilasterv1.App, error) {
	at := strings.LastIndexByte(key, '/')
	n, err := strconv.ParseUint(key[at+1:], 10, 16)
	if err != nil {
		return nil, fmt.Errorf("the store's %s is not readable: it names no app", key)
	}
	return &pilasterv1.App{Tenant: strings.TrimPrefix(key[:max(at, len(dir))], dir), Id: uint32(n)}, nil
}

// putApp writes an app, and the claim on its id last: a reader that finds the claim also finds the app.
func (t *txn) putApp(app *pilasterv1.App, hash string, mark uint64) error {
	t.setMark(dirAppMarks+app.Tenant, mark)
	if err := t.save(dirApps+app.Tenant+"/"+hash, app); err != nil {
		return err
	}
	t.put(appIDKey(app.Tenant, app.Id), hash)
	return nil
}

func appIDKey(name string, id uint32) string { return fmt.Sprintf("%s%s/%d", dirAppIDs, name, id) }

func appQuarantineKey(name string, id uint32) string {
	return fmt.Sprintf("%s%s/%d", dirAppQuarantine, name, id)
}

func hashLabels(labels map[string]string) (string, error) {
	if err := tenant.CheckLabels(labels); err != nil {
		return "", refuse(Invalid, "%v", err)
	}
	return fmt.Sprintf("%x", sha256.Sum256([]byte(tenant.Canonical(labels)))), nil
}
