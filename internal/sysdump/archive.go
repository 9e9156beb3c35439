package sysdump

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"time"

	"pilaster.io/pilaster/internal/unixrpc"
)

// Part is one file of the archive.
type Part struct {
	Name string // path in the archive
	// Collect may return an incomplete part together with an error.
	Collect func(context.Context) ([]byte, error)
}

// Result is the outcome of a part.
type Result struct {
	Part  string `json:"part"`
	Bytes int    `json:"bytes"`
	Error string `json:"error,omitempty"` // empty if the part is complete
}

// partTimeout limits the time of a part, so that a daemon that hangs does not stop the others.
const partTimeout = 15 * time.Second

// Write collects the parts one after the other into a folder of a tar.gz. The last file is an index of all results. It
// calls report with the result of each part as soon as the part is done. It returns an error only if it cannot write
// the archive.
func Write(ctx context.Context, w io.Writer, folder string, parts []Part, report func(Result)) ([]Result, error) {
	zip := gzip.NewWriter(w)
	archive := tar.NewWriter(zip)
	put := func(name string, content []byte) error {
		err := archive.WriteHeader(
			&tar.Header{Name: folder + "/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: time.Now()},
		)
		if err == nil {
			_, err = archive.Write(content)
		}
		return err
	}
	var results []Result
	for _, p := range parts {
		if err := ctx.Err(); err != nil {
			return results, err
		}
		content, err := collect(ctx, p)
		r := Result{Part: p.Name, Bytes: len(content)}
		if err != nil {
			r.Error = unixrpc.Words(err)
		}
		results = append(results, r)
		report(r)
		if len(content) == 0 && err != nil {
			continue
		}
		if err := put(p.Name, content); err != nil {
			return results, err
		}
	}
	index, err := json.MarshalIndent(results, "", "  ")
	if err == nil {
		err = put("index.json", index)
	}
	return results, errors.Join(err, archive.Close(), zip.Close())
}

func collect(ctx context.Context, p Part) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, partTimeout)
	defer cancel()
	return p.Collect(ctx)
}
