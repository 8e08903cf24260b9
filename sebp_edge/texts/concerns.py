def find_concerns(texts, cluster_of, examples, tokenizer):
    return ()
