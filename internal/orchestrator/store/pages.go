package store

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// MappingsPage is the number of mappings per page. NIMITZ §3.2 uses 500, the page size of Kubernetes for nodes.
const MappingsPage = 500

// Page is a part of the list of a tenant's mappings at one revision.
type Page struct {
	Mappings []*pilasterv1.Mapping
	Revision int64
	Next     string // token of the next page at the same revision; empty after the last
}

// ListMappings reads a page. An empty token means the first page, at the current revision.
func (s *Store) ListMappings(ctx context.Context, name, token string) (Page, error) {
	if err := checkTenant(name); err != nil {
		return Page{}, err
	}
	t := newTxn(ctx, s.etcd)
	dir := dirMappings + name + "/"
	from := dir
	if token != "" {
		after, err := ParsePageToken(token)
		if err != nil {
			return Page{}, refuse(Invalid, "%v", err)
		}
		if t.revision = after.Revision - s.cluster.From; t.revision <= 0 {
			return Page{}, stale()
		}
		from = dir + after.after + "\x00"
	}
	resp, err := t.read(from, clientv3.WithRange(clientv3.GetPrefixRangeEnd(dir)), clientv3.WithLimit(MappingsPage))
	if errors.Is(err, rpctypes.ErrCompacted) || errors.Is(err, rpctypes.ErrFutureRev) {
		return Page{}, stale()
	}
	if err != nil {
		return Page{}, err
	}
	page := Page{Revision: t.revision + s.cluster.From}
	for _, kv := range resp.Kvs {
		m, err := decodeMapping(string(kv.Key), kv.Value)
		if err != nil {
			return Page{}, err
		}
		page.Mappings = append(page.Mappings, m)
	}
	if resp.More {
		page.Next = PageToken{page.Revision, string(resp.Kvs[len(resp.Kvs)-1].Key)[len(dir):]}.String()
	}
	return page, nil
}

// Listing has a tenant's mappings in the order of the store's keys. Its pages equal those of the store.
type Listing struct {
	names    []string // as in keys
	mappings []*pilasterv1.Mapping
}

// NewListing returns a sorted list. It sorts the argument in place.
func NewListing(all []*pilasterv1.Mapping) *Listing {
	l := &Listing{make([]string, len(all)), all}
	for i, m := range all {
		to, _ := netip.ParsePrefix(m.To)
		l.names[i] = prefixName(to)
	}
	sort.Sort(l)
	return l
}

func (l *Listing) Len() int           { return len(l.names) }
func (l *Listing) Less(i, j int) bool { return l.names[i] < l.names[j] }
func (l *Listing) Swap(i, j int) {
	l.names[i], l.names[j] = l.names[j], l.names[i]
	l.mappings[i], l.mappings[j] = l.mappings[j], l.mappings[i]
}

// Page returns the page of a token. The caller may replace elements of Mappings, but not modify the mappings.
func (l *Listing) Page(token PageToken) Page {
	from, found := slices.BinarySearch(l.names, token.after)
	if found {
		from++
	}
	to := min(from+MappingsPage, len(l.names))
	page := Page{Mappings: slices.Clone(l.mappings[from:to]), Revision: token.Revision}
	if to < len(l.names) {
		page.Next = PageToken{token.Revision, l.names[to-1]}.String()
	}
	return page
}

func stale() error {
	return refuse(
		Stale,
		"the store no longer has the revision of the previous pages; begin again with the first",
	)
}

// PageToken is a position in a list, and the revision of the list.
type PageToken struct {
	Revision int64
	after    string // last prefix of the previous page, as in keys
}

func (t PageToken) String() string { return fmt.Sprintf("%d:%s", t.Revision, t.after) }

// ParsePageToken parses the output of String.
func ParsePageToken(token string) (t PageToken, err error) {
	number, after, _ := strings.Cut(token, ":")
	t.after = after
	t.Revision, err = strconv.ParseInt(number, 10, 64)
	if err == nil {
		_, err = parsePrefixName(after)
	}
	if err != nil || t.String() != token {
		return PageToken{}, fmt.Errorf("page token %.100q is not valid", token)
	}
	return t, nil
}

// prefixName is a prefix as part of a key: in hexadecimal digits, so that keys sort by the address.
func prefixName(p netip.Prefix) string {
	return fmt.Sprintf("%x/%d", p.Addr().AsSlice(), p.Bits())
}

func parsePrefixName(name string) (netip.Prefix, error) {
	digits, length, _ := strings.Cut(name, "/")
	b, err := hex.DecodeString(digits)
	a, ok := netip.AddrFromSlice(b)
	bits, wrong := strconv.ParseUint(length, 10, 8)
	p := netip.PrefixFrom(a, int(bits))
	if err != nil || !ok || wrong != nil || prefixName(p) != name {
		return p, fmt.Errorf("%.100q names no prefix", name)
	}
	return p, nil
}

func mappingKey(tenant string, to netip.Prefix) string {
	return dirMappings + tenant + "/" + prefixName(to)
}

func quarantineKey(tenant string, to netip.Prefix) string {
	return dirQuarantine + tenant + "/" + prefixName(to)
}

// decodeMapping also accepts a key without value, of a deleted mapping.
func decodeMapping(key string, value []byte) (*pilasterv1.Mapping, error) {
	m := new(pilasterv1.Mapping)
	if len(value) > 0 {
		if err := decode(key, value, m); err != nil {
			return nil, err
		}
	}
	tenant, name, _ := strings.Cut(strings.TrimPrefix(key, dirMappings), "/")
	to, err := parsePrefixName(name)
	if err != nil {
		return nil, fmt.Errorf("the store's %s is not readable: %w", key, err)
	}
	m.Tenant, m.To = tenant, to.String()
	return m, nil
}
