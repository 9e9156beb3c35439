package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/orchestrator/rpc"
)

// documentFiles is the flag for files with policies.
type documentFiles struct {
	names []string
	of    []int // for each document, the index of its file
}

func (f *documentFiles) bind(cmd *cobra.Command, usage string) {
	cmd.Flags().StringArrayVarP(&f.names, "filename", "f", nil, usage)
}

// read returns the documents of all files, in order.
func (f *documentFiles) read(env Env) (documents []string, err error) {
	for i, file := range f.names {
		text, err := readFile(env, file)
		if err != nil {
			return nil, err
		}
		some := rpc.SplitDocuments(string(text))
		documents = append(documents, some...)
		f.of = append(f.of, slices.Repeat([]int{i}, len(some))...)
	}
	if len(documents) == 0 {
		return nil, usage("the files contain no document; nothing was changed")
	}
	return documents, nil
}

// readFile reads a file, or standard input as "-".
func readFile(env Env, file string) (text []byte, err error) {
	if file == "-" {
		text, err = io.ReadAll(env.Stdin)
	} else {
		text, err = os.ReadFile(file)
	}
	if err != nil {
		return nil, usage("%w; nothing was changed", err)
	}
	return text, nil
}

// documentNumber matches the number of the document in a message of the orchestrator.
var documentNumber = regexp.MustCompile(`(^|first in )document (\d+)`)

// named replaces, if there are several files, the number of a document in an error of the orchestrator by the file's
// name and the document's number in this file.
func (f *documentFiles) named(err error) error {
	var remote *connect.Error
	if len(f.names) < 2 || !errors.As(err, &remote) {
		return err
	}
	words := documentNumber.ReplaceAllStringFunc(remote.Message(), func(match string) string {
		parts := documentNumber.FindStringSubmatch(match)
		n, err := strconv.Atoi(parts[2])
		if err != nil || n < 1 || n > len(f.of) {
			return match
		}
		in := f.of[n-1]
		return fmt.Sprintf("%s%s, document %d", parts[1], f.names[in], n-slices.Index(f.of, in))
	})
	return connect.NewError(remote.Code(), errors.New(words))
}
